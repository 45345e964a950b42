"""What `dpo` and `distill` cost beside `sft` on the same tokens: with a second model, stored, or the model's own.

    python benchmarks/preferences.py           # writes benchmarks/results/preferences.md
    python benchmarks/preferences.py stored    # one of `LOOPS`; prints CPU seconds and bytes

33 M parameters of Llama's shape, 2 pairs of answers a step, or the same four answers alone.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import torch
from safetensors.torch import load_file

from forge_train import Job, Model, Plugin, StepResult, hookimpl
from forge_train.mesh.tensors import held_bytes
from forge_train_tools.testing import run_forge

RESULTS = Path(__file__).parent / "results" / "preferences.md"
SEQUENCE, ROWS, PAIRS = 256, 4, 40
STEPS, WARM_UP, TURNS = 8, 2, 3
LORA = {"lora.rank": 16, "train.init_missing": ["*lora_*"]}
LOOPS = ("sft", "stored", "sft_lora", "dpo_lora", "distill", "distill_stored")
TOP_K = 64
NOTE = "33 M parameters of Llama's shape in fp32, 4 answers of about 250 tokens a step, by turns."


def config() -> dict[str, Any]:
    """Of every run."""
    return {
        "decoder.dim": 512,
        "decoder.layers": 8,
        "decoder.heads": 8,
        "decoder.hidden": 1408,
        "decoder.vocabulary": 8192,
        "decoder.max_sequence": SEQUENCE,
        "train.sequence": SEQUENCE,
        "train.global_batch": ROWS,
        "train.micro_batch": ROWS,
        "train.evaluate_every": 0,
        "checkpoint.every": 0,
        "cosine.warmup": 2,
    }


class Measured(Plugin):
    """CPU time of the steps after the warm-up, and the bytes of all models and of the optimizer's state."""

    api = (1, 0)
    seconds = held = 0.0

    @hookimpl
    def on_start(self, job: Job, model: Model, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.others = model, optimizer, job.models

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        if step.step == WARM_UP:
            self.seconds = -time.process_time()
        if step.step == STEPS:
            self.seconds += time.process_time()
            states = [one for state in self.optimizer.state.values() for one in state.values() if torch.is_tensor(one)]
            weights = [one for model in (self.model, *self.others.values()) for one in model.parameters()]
            self.held = held_bytes([*weights, *states])


def write(folder: Path) -> None:
    """Pairs of answers, and the same answers alone."""
    draw = random.Random(0)
    pairs, alone = [], []
    for at in range(PAIRS):
        both = ["".join(draw.choices("abcdefgh ", k=190)) for _ in range(2)]
        prompt = f"question {at:02}"
        pairs.append({"prompt": prompt, "chosen": both[0], "rejected": both[1]})
        alone += [{"prompt": prompt, "completion": one} for one in both]
    for name, records in (("pairs", pairs), ("alone", alone)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")


def run(which: str) -> None:
    """One of the loops."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder)
        base = run_forge(["synthetic"], config() | {"synthetic.vocabulary": 8192}, steps=3, folder=folder / "base").run
        plugins, values = ["preferences:Measured"], config() | {"train.init_from": str(base)}
        if which.endswith("lora"):
            plugins, values = ["lora", *plugins], values | LORA
        if which.startswith(("sft", "distill")):
            plugins = ["sft", *plugins]
            values |= {"sft.path": str(folder / "alone.jsonl"), "sft.template": "plain", "sft.packing": "pad"}
        else:
            plugins = ["dpo", "text_pairs", *plugins]
            values |= {"text_pairs.path": str(folder / "pairs.jsonl"), "text_pairs.template": "plain"}
        if which.startswith("distill"):
            plugins, values = ["distill", *plugins], values | {"distill.weights": str(base)}
        if which == "distill_stored":
            values |= {"distill.stored": str(folder / "logits"), "distill.top_k": TOP_K}
        if which == "stored":
            values |= {"dpo.stored": str(folder / "reference.json")}
        if which.endswith("stored"):
            run_forge(plugins, values, without=["text"], steps=3, folder=folder / "first")
        done = run_forge(plugins, values, without=["text"], steps=STEPS, folder=folder / "run")
        seen = done.plugin("measured")
        parts = [load_file(one) for one in folder.glob("logits/*.safetensors")]
        stored = sum(one.nbytes for part in parts for one in part.values())
        learned = sum(len(part["tokens"]) for part in parts)
        print(json.dumps({"seconds": seen.seconds, "held": seen.held, "stored": stored / (learned or 1)}))


def measured(which: str) -> dict[str, float]:
    command = [sys.executable, __file__, which]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    from run import Row, table

    found: dict[str, list[dict[str, float]]] = {which: [] for which in LOOPS}
    for _ in range(TURNS):
        for which, runs in found.items():
            runs.append(measured(which))
    seconds = {which: min(one["seconds"] for one in runs) for which, runs in found.items()}
    stored, own = seconds["stored"] / seconds["sft"], seconds["dpo_lora"] / seconds["sft_lora"]
    live, logits = seconds["distill"] / seconds["sft"], seconds["distill_stored"] / seconds["sft"]
    bytes_each = found["distill_stored"][-1]["stored"]
    held = found["dpo_lora"][-1]["held"] / found["sft_lora"][-1]["held"]
    rows = [
        Row("CPU time of a step, `dpo` with a stored reference / `sft`", f"{stored:.3f}", "≤ 1.05", stored <= 1.05),
        Row("weights and optimizer state, `dpo,lora` / `sft,lora`", f"{held:.3f}", "≤ 1.0", held <= 1.0),
        Row("CPU time of a step, `dpo,lora` / `sft,lora`: one more forward pass", f"{own:.3f}", "—", True),
        Row(
            f"CPU time of a step, `distill` with {TOP_K} stored tokens / `sft`", f"{logits:.3f}", "≤ 1.1", logits <= 1.1
        ),
        Row("CPU time of a step, `distill` with a teacher as large as the student / `sft`", f"{live:.3f}", "—", True),
        Row(f"bytes of a learned token, {TOP_K} stored in fp16", f"{bytes_each:.1f}", "≤ 400", bytes_each <= 400),
    ]
    for row in rows:
        print(f"{'ok  ' if row.ok else 'MISS'} {row.what}: {row.measured} (bar {row.bar})", flush=True)
    page = table(rows, "Preferences, on one process", "python benchmarks/preferences.py", NOTE)
    RESULTS.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    run(sys.argv[1]) if len(sys.argv) > 1 else main()
