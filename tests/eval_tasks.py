"""Tasks of Python's standard library, and a model to ask, for the tests of `forge eval --task`."""

from __future__ import annotations

import json
import keyword
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

import chat_model

TOML = """\
[modules]
kind = "choice"
data = "modules.jsonl"
prompt = "Module: {name}\\nSays:"
prefix = "Modules of Python.\\n\\n"
shots = 1
shots_data = "modules.jsonl"

[prose]
kind = "perplexity"
data = "prose.jsonl"

[words]
kind = "generate"
data = "words.jsonl"
tokens = 6
samples = 3
k = [1, 2]
temperature = 1.0
"""


def write_lines(file: Path, records: Iterable[Mapping[str, Any]]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def write_desk(folder: Path) -> None:
    """A model in `hf`, and tasks: `tasks.toml` with its records, and files for lm-eval."""
    import argparse
    import textwrap as wrapping

    if not (folder / "hf").is_dir():
        chat_model.write_model(folder / "hf", head=4.0)
    docs = [(one.__doc__ or "").split("\n")[0] for one in (json, keyword, argparse, wrapping)]
    names = [one.__name__ for one in (json, keyword, argparse, wrapping)]
    write_lines(
        folder / "modules.jsonl",
        (
            {"name": name, "choices": [docs[at][:18], docs[at - 1][:25], "é" * 3], "answer": [0] if at % 2 else 0}
            for at, name in enumerate(names)
        ),
    )
    long = " ".join(sorted(keyword.kwlist))
    write_lines(folder / "prose.jsonl", ({"text": text} for text in (long, "say é", "say one and then say two")))
    write_lines(folder / "words.jsonl", ({"prompt": f"say {at}", "answer": ["one", "two"]} for at in range(3)))
    (folder / "tasks.toml").write_text(TOML, encoding="utf-8")


class ByTransformers:
    """Log-likelihoods of the model in `hf`, one text at a time."""

    def __init__(self, folder: Path = Path("hf")) -> None:
        import transformers

        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.longest = self.model.config.max_position_embeddings

    def ids(self, text: str) -> list[int]:
        return [*self.tokenizer(text).input_ids]

    def of_ids(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """The sum over the continuation, and whether each of its tokens is the likeliest."""
        row = [*context, *continuation][-(self.longest + 1) :]
        with torch.no_grad():
            each = self.model(torch.tensor([row[:-1]])).logits[0].double().log_softmax(-1)
        asked, size = torch.tensor(continuation), len(continuation)
        own = each[-size:]
        return float(own.gather(1, asked[:, None]).sum()), bool((own.argmax(-1) == asked).all())

    def pair(self, context: str, continuation: str) -> tuple[float, bool]:
        whole, given = self.ids(context + continuation), len(self.ids(context))
        return self.of_ids(whole[:given], whole[given:])

    def rolling(self, text: str) -> float:
        """Each token by itself, after as many as its window holds (lm-evaluation-harness' cut)."""
        ids, total = [0, *self.ids(text)], 0.0
        for at in range(1, len(ids)):
            stop = min(-(-at // self.longest) * self.longest, len(ids) - 1)
            total += self.of_ids(ids[max(stop - self.longest, 0) : at], [ids[at]])[0]
        return total
