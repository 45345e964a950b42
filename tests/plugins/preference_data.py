"""Records with answers, the plugins that read them, and what their batches hold."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from forge_train import MASKED, Batch
from forge_train_kit.data.tokenizers import open_tokenizer
from forge_train_plugins.data.text_feedback import TextFeedback
from forge_train_plugins.data.text_pairs import TextPairs
from forge_train_plugins.data.tokenizer import Tokenizer
from forge_train_plugins.tasks.dpo import DPO

COUNT = 13
TRIMMING = "{% for m in messages %}{{ m.content | trim }}{% endfor %}"
"""A template without a token that ends a turn."""
RECORDS: dict[str, list[dict[str, Any]]] = {
    "preference": [{"prompt": f"say {n}", "chosen": f"yes {n}", "rejected": f"no, not {n}"} for n in range(COUNT)],
    "embedding": [{"anchor": f"a {n}", "positive": f"the text of a {n}"} for n in range(COUNT)],
    "packed": [
        {"prompt": f"say {n}", "chosen": "yes " * (1 + n % 5), "rejected": f"no, not {n}"} for n in range(COUNT)
    ],
    "feedback": [{"prompt": f"say {n}", "completion": f"no {n}", "label": n % 3 == 0} for n in range(COUNT)],
}


def write(here: Path, *records: object, name: str = "records.jsonl") -> None:
    (here / name).write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")


def job(here: Path, rank: int = 0, ranks: int = 1, micro_batch: int = 2, sequence: int = 48) -> Any:
    section = Tokenizer.Config(path=str(here / "hf"))
    plugin = Tokenizer(section)
    return SimpleNamespace(
        hooks=SimpleNamespace(
            call=lambda spec, arguments: [] if spec.name == "modalities" else plugin.tokenizer(None),  # type: ignore[arg-type]
            provider=lambda slot: slot,
            plugins={"tokenizer": plugin, "task": DPO},
        ),
        config=SimpleNamespace(
            train=SimpleNamespace(sequence=sequence, micro_batch=micro_batch, evaluate_every=0),
            sections={"tokenizer": section},
        ),
        dist=SimpleNamespace(data_rank=rank, data_ranks=ranks),
        device=torch.device("cpu"),
        seed=0,
    )


def opened(here: Path, kind: str = "preference", name: str = "records.jsonl", **options: Any) -> Any:
    """The plugin that reads a kind of records, preferences also `packed`. A template is its text."""
    plugin = TextFeedback if kind == "feedback" else TextPairs
    if text := options.get("template"):
        (here / "own.jinja").write_text(text, encoding="utf-8")
        options["template"] = str(here / "own.jinja")
    if kind == "embedding":
        options["kind"] = kind
    if kind == "packed":
        options["packing"] = "best_fit"
    options = {"path": str(here / name), "cache": str(here / "cache"), "held_out": 0.0, **options}
    return plugin(plugin.Config(**options))


def said(*contents: str, **more: Any) -> list[dict[str, Any]]:
    """Messages of the user and the assistant by turns; more keys of the last one."""
    found: list[dict[str, Any]] = [
        {"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)
    ]
    found[-1] |= more
    return found


def texts(here: Path, batch: Batch) -> list[tuple[str, str]]:
    """Of each row: what it holds without padding, and what of it is learned."""
    tokenizer, found = open_tokenizer(str(here / "hf")), []
    assert batch.document_ids is not None
    assert batch.position_ids is not None
    for row, ids in enumerate(batch.document_ids):
        size = int((ids == 0).sum())
        assert (batch.labels[row][size:] == MASKED).all()
        places = [*range(size), *range(len(ids) - size)]
        assert batch.position_ids[row].tolist() == places
        learned = batch.labels[row][batch.labels[row] != MASKED]
        found.append((tokenizer.decode(batch.inputs[row][:size].tolist()), tokenizer.decode(learned.tolist())))
    return found
