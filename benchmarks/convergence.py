"""How fast optimizers learn real text: each at its best of several learning rates, over three seeds.

    python benchmarks/convergence.py              # hours; writes benchmarks/results/convergence.md
    python benchmarks/convergence.py --only muon  # part of it: what is done is kept in --log, and counts the next time

1.5M parameters read one byte of Python's standard library per parameter. Every optimizer has the same batches, the same
model and as much warm-up; `schedule_free` has no schedule, the others a cosine. The best learning rate is chosen on the
first seed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev

RESULTS = Path(__file__).parent / "results" / "convergence.md"
STEPS, EVERY, WARMUP, SEEDS = 750, 25, 75, (1, 2, 3)
MODEL = (
    "train.global_batch=8",
    "train.sequence=256",
    f"train.steps={STEPS}",
    f"train.evaluate_every={EVERY}",
    "checkpoint.every=0",
    "decoder.dim=128",
    "decoder.layers=7",
    "decoder.heads=4",
    "decoder.qk_norm=true",
    "text.isolate=false",
    "text.baseline=false",
)
OPTIMIZERS: dict[str, tuple[tuple[float, ...], tuple[str, ...]]] = {
    # Learning rates, and options; {lr} is each of them.
    "adamw": ((5e-4, 1e-3, 2e-3, 4e-3), ("adamw.lr={lr}", f"cosine.warmup={WARMUP}")),
    "muon": ((1e-3, 2e-3, 4e-3), ("muon.lr={lr}", "muon.adamw.lr={lr}", f"cosine.warmup={WARMUP}")),
    "schedule_free": ((2e-3, 4e-3, 8e-3), ("schedule_free.lr={lr}", f"schedule_free.warmup={WARMUP}")),
}

HEAD = (
    "# Convergence",
    "",
    f"Written by `python benchmarks/convergence.py`: 1.5M parameters, {STEPS} steps of 2,048 bytes of Python's",
    f"standard library, on a CPU in fp32. Held-out loss in nats per byte, mean and deviation over {len(SEEDS)} seeds.",
    "",
    "| optimizer | learning rate: last loss, first seed | best | last loss | tokens to AdamW's last loss, of all |",
    "|---|---|---|---|---|",
)

Curve = list[tuple[int, float]]
"""Step and held-out loss, nats per byte."""


def run(optimizer: str, lr: float, seed: int) -> Curve:
    """Train once."""
    options = (*MODEL, f"run.seed={seed}", *(text.format(lr=lr) for text in OPTIMIZERS[optimizer][1]))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "forge_train_cli", "train", "-p", optimizer, "-s", "run.name=r"]
        command += [part for option in options for part in ("-s", option)]
        threads = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder, env=threads)
        events = (Path(folder) / "runs" / "r" / "events.jsonl").read_text(encoding="utf-8").splitlines()
    found = [one for one in map(json.loads, events) if one["event"] == "evaluation"]
    return [(one["step"], one["loss"]) for one in found]


class Log:
    """Runs that are done, one a line."""

    def __init__(self, file: Path) -> None:
        self.file = file
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        self.done: dict[tuple[str, float, int], Curve] = {}
        for one in map(json.loads, lines):
            self.done[one["optimizer"], one["lr"], one["seed"]] = [(step, loss) for step, loss in one["curve"]]

    def curve(self, optimizer: str, lr: float, seed: int) -> Curve:
        if (optimizer, lr, seed) not in self.done:
            curve = self.done[optimizer, lr, seed] = run(optimizer, lr, seed)
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"optimizer": optimizer, "lr": lr, "seed": seed, "curve": curve}) + "\n")
            print(f"{optimizer} {lr:g} seed {seed}: {curve[-1][1]:.4f}", flush=True)
        return self.done[optimizer, lr, seed]


def best_of(optimizer: str, log: Log) -> tuple[dict[float, float], float, list[Curve]]:
    """The first seed's last loss at each learning rate, the best rate, and its curves over all seeds."""
    first = {lr: log.curve(optimizer, lr, SEEDS[0])[-1][1] for lr in OPTIMIZERS[optimizer][0]}
    best = min(first, key=lambda lr: first[lr])
    return first, best, [log.curve(optimizer, best, seed) for seed in SEEDS]


def row(optimizer: str, log: Log) -> str:
    """A line of the table; the share of the tokens is that after which the mean is at AdamW's last."""
    first, best, curves = best_of(optimizer, log)
    goal = average(best_of("adamw", log)[2])[-1][1]
    reached = next((f"{step / STEPS:.2f}" for step, loss in average(curves) if loss <= goal), "not reached")
    tried = ", ".join(f"{lr:g}: {loss:.3f}" for lr, loss in first.items())
    last = [curve[-1][1] for curve in curves]
    return f"| {optimizer} | {tried} | {best:g} | {mean(last):.4f} ± {stdev(last):.4f} | {reached} |"


def average(curves: list[Curve]) -> Curve:
    return [(points[0][0], mean(loss for _, loss in points)) for points in zip(*curves, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(OPTIMIZERS), help="this optimizer; may be repeated")
    parser.add_argument("--log", type=Path, default=Path("convergence.jsonl"), help="where runs that are done are kept")
    arguments = parser.parse_args()
    log = Log(arguments.log)
    rows = [row(optimizer, log) for optimizer in arguments.only or OPTIMIZERS]
    text = "\n".join([*HEAD, *rows]) + "\n"
    print(text)
    if not arguments.only:
        RESULTS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
