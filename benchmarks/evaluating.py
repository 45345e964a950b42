"""1,000 requests to a model, whatever is beside them and whoever computes them: the answers must be the same.

    python benchmarks/evaluating.py   # writes benchmarks/results/evaluating.md, in twenty minutes on two busy cores

500 choices are scored, 250 prompts answered by the likeliest tokens and 250 by drawn ones, from Python's standard
library: on one process and five layouts of two, from the checkpoint of a run in batches of 1, 3, 8 and 32, and from its
export. Scores and likeliest tokens are compared with lm-eval's own model on the export too.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import textwrap

from forge_train_tools import evaluate, train
from forge_train_tools.evaluation.results import file_name
from forge_train_tools.offline.huggingface import export_checkpoint

RESULTS = Path(__file__).parent / "results" / "evaluating.md"
RECORDS, TOKENS = 250, 4
BATCHES = (1, 3, 8, 32)
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "one process": (),
    "fsdp2 × 2": ("fsdp2",),
    "tp2": ("tp",),
    "pp2": ("pp",),
    "cp2": ("cp",),
    "ep2": ("ep", "fsdp2"),
}
MODELS: Mapping[str, tuple[str, ...]] = {"dense": (*LAYOUTS,)[:-1], "experts": ("one process", "ep2")}
"""Layouts that each is asked on."""
BOUND = 1e-6
TASKS = """\
[choices]
kind = "choice"
data = "choices.jsonl"

[likeliest]
kind = "generate"
data = "prompts.jsonl"
tokens = {tokens}
stop = []

[drawn]
kind = "generate"
data = "prompts.jsonl"
tokens = {tokens}
stop = []
temperature = 1.0
top_p = 0.9
"""


@dataclass
class Compared:
    """Differences from one process in batches of eight."""

    worst: float = 0.0
    """Of log-likelihoods, relative."""
    changed: dict[str, int] = field(default_factory=dict)
    """Answers that are other ones."""
    seconds: float = 0.0

    def add(self, other: Compared) -> None:
        self.worst = max(self.worst, other.worst)
        self.seconds += other.seconds
        for name, count in other.changed.items():
            self.changed[name] = self.changed.get(name, 0) + count


def write_tasks() -> None:
    """Lines of the library's sources: what follows a line, and a line from elsewhere."""
    lines = [line for line in Path(textwrap.__file__).read_text(encoding="utf-8").splitlines() if line.strip()]
    lines = (lines * 2)[: RECORDS + 2]
    choices = (
        {"prompt": one[:40], "choices": [after.strip()[:30], lines[-at - 1].strip()[:25] + "#"], "answer": 0}
        for at, (one, after) in enumerate(pairwise(lines))
    )
    _write("choices.jsonl", [*choices][:RECORDS])
    _write("prompts.jsonl", [{"prompt": f"{at}: {one[:30]}", "answer": "x"} for at, one in enumerate(lines)][:RECORDS])
    Path("tasks.toml").write_text(TASKS.format(tokens=TOKENS), encoding="utf-8")
    Path("scored.toml").write_text(TASKS.partition("[likeliest]")[0], encoding="utf-8")


def _write(name: str, records: Iterable[Mapping[str, Any]]) -> None:
    Path(name).write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")


def write_model(folder: str, *, experts: bool) -> None:
    """A random model of transformers with a tokenizer of bytes, whose head is large enough to have favourites."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({"<end>": 0, **{one: at for at, one in enumerate(alphabet, 1)}}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    shape = {
        "vocab_size": len(alphabet) + 1,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": 0,
    }
    more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**shape, **more) if experts else transformers.LlamaConfig(**shape)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.lm_head.weight.data.mul_(8)
    model.save_pretrained(folder)


def ask(path: str, out: str, batch: int, layout: str) -> Compared:
    """Ask everything, and keep it in a folder."""
    plugins, began = LAYOUTS[layout], time.monotonic()
    axis = {f"parallel.{plugins[0]}": 2} if plugins and plugins[0] != "fsdp2" else {}
    evaluate(
        path,
        ["tasks.toml"],
        plugins=plugins,
        set={"run.device": "cpu", **axis},
        nproc=2 if plugins else 1,
        batch=batch,
        samples=Path(out),
    )
    return Compared(seconds=time.monotonic() - began)


def kept(folder: str, task: str) -> list[dict[str, Any]]:
    file = Path(folder) / file_name(task, "jsonl")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def compare(mine: str, theirs: str) -> Compared:
    found = Compared()
    for one, other in zip(kept(mine, "choices"), kept(theirs, "choices"), strict=True):
        for left, right in zip(one["log_likelihoods"], other["log_likelihoods"], strict=True):
            found.worst = max(found.worst, abs(left - right) / abs(right))
    for task in ("likeliest", "drawn"):
        if answers := kept(mine, task):
            pairs = zip(answers, kept(theirs, task), strict=True)
            found.changed[task] = sum(one["answers"] != other["answers"] for one, other in pairs)
    return found


def by_its_own_model(export: str, reference: str) -> Compared:
    """The same requests to lm-eval's own model."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model, began = HFLM(pretrained=export, device="cpu", batch_size=1, dtype="float32"), time.monotonic()
    pairs, found = [], Compared(changed={"likeliest": 0})
    for one in kept(reference, "choices"):
        both = zip(one["choices"], one["log_likelihoods"], strict=True)
        pairs += [((one["prompt"], f" {choice}"), value) for choice, value in both]
    asked = [Instance("loglikelihood", {}, args, at) for at, (args, _) in enumerate(pairs)]
    for (value, _), (_, own) in zip(model.loglikelihood(asked, disable_tqdm=True), pairs, strict=True):
        found.worst = max(found.worst, abs(value - own) / abs(own))
    texts = kept(reference, "likeliest")
    how = {"until": [], "max_gen_toks": TOKENS, "do_sample": False}
    prompts = [Instance("generate_until", {}, (one["prompt"], how), at) for at, one in enumerate(texts)]
    for text, one in zip(model.generate_until(prompts, disable_tqdm=True), texts, strict=True):
        found.changed["likeliest"] += text != one["answers"][0]
    found.seconds = time.monotonic() - began
    return found


def measured() -> dict[str, Compared]:
    """Row of the table → the largest differences."""
    write_tasks()
    table: dict[str, Compared] = {}
    for name, layouts in MODELS.items():
        write_model(name, experts=name == "experts")
        settings = {"train.steps": 1, "train.sequence": 64, "train.global_batch": 2, "run.device": "cpu"}
        more = {"text.path": textwrap.__file__, "adamw.lr": 1e-4, "train.evaluate_every": 0}
        run = train(model_from=name, plugins=["text"], set=settings | more, name=f"{name}-run", quiet=True)
        export = f"{name}-export"
        export_checkpoint(run.path, Path(export))
        reference = f"{name}-reference"
        ask(str(run.path), reference, 8, "one process")
        for layout in layouts:
            row = table[f"{name}, {layout}"] = Compared()
            for batch, path in (*((batch, str(run.path)) for batch in BATCHES), (BATCHES[-2], export)):
                out = f"{name}-{layout}-{batch}-{Path(path).name}"
                row.add(ask(path, out, batch, layout))
                row.add(compare(out, reference))
            print(f"{name}, {layout}: {row}", flush=True)
        table[f"{name}, lm-eval's own model on the export"] = by_its_own_model(export, reference)
    return table


def page(table: Mapping[str, Compared]) -> str:
    lines = [
        "# 1,000 requests, everywhere the same",
        "",
        "`python benchmarks/evaluating.py`: 500 choices, 250 prompts that are answered by the likeliest tokens and 250",
        "by drawn ones, from a run's checkpoint in batches of 1, 3, 8 and 32, and from its export in batches of 8,",
        f"against one process. The bound of log-likelihoods is {BOUND:g}, relative; no answer may change. lm-eval's",
        "model draws other numbers. What tasks cost a run that is trained:",
        "[evaluating-training.md](evaluating-training.md).",
        "",
        "| model and layout | largest difference of a log-likelihood | changed likeliest | changed drawn | seconds |",
        "|---|---|---|---|---|",
    ]
    for name, row in table.items():
        changed = [str(row.changed.get(task, "–")) for task in ("likeliest", "drawn")]
        lines.append(f"| {name} | {row.worst:.1e} | {' | '.join(changed)} | {row.seconds:.0f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        found = measured()
    RESULTS.write_text(page(found), encoding="utf-8")
    assert all(row.worst <= BOUND and not sum(row.changed.values()) for row in found.values()), found
