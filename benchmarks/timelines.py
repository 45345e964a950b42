"""Pipelines whose parts sleep, against the simulated timeline: four gloo ranks, every schedule.

    python benchmarks/timelines.py

Prints a table: seconds of a step measured (the least of several) and simulated. A part sleeps for its forward pass, for
the gradient of its input and for that of its weights; everything else takes next to no time.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forge_train import Plugin, hookimpl, section
from forge_train_kit.model import Embedding, Linear
from forge_train_kit.pipeline import wanted_gradients
from forge_train_plugins.parallel._pp.rules import RULES
from forge_train_plugins.parallel._pp.schedules import named
from forge_train_tools.planning.timeline import PartCost, simulate
from forge_train_tools.testing import Pool, run_forge

RANKS, MICRO_BATCHES, STEPS = 4, 8, 3
FORWARD, INPUT, WEIGHT = 0.24, 0.24, 0.24
"""Seconds that the parts of one rank take together; long beside what a message takes on a busy machine."""
LIMIT = 0.10
"""How far the two may be apart."""


class Sleeps(torch.autograd.Function):
    """Gives what it is given, later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, share: float) -> Tensor:
        ctx.share, ctx.shape = share, weight.shape
        time.sleep(FORWARD * share)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        wanted = wanted_gradients()
        time.sleep(((wanted != "weight") * INPUT + (wanted != "input") * WEIGHT) * ctx.share)
        return gradients[0], gradients[0].new_zeros(ctx.shape), None


class Sleeper(nn.Module):
    """A unit of a model."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.linear = Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return Sleeps.apply(x, self.linear.weight, self.share)  # type: ignore[no-any-return, no-untyped-call]


class Sleeping(nn.Module):
    """As many units as parts, an embedding before the first and a head behind the last."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.embedding: nn.Module | None = Embedding(512, 8)
        self.layers = nn.ModuleDict({str(index): Sleeper(RANKS / parts) for index in range(parts)})
        self.head: nn.Module | None = Linear(8, 512)

    @property
    def units(self) -> tuple[str, ...]:
        return tuple(f"layers.{index}" for index in self.layers)

    @property
    def stages(self) -> tuple[tuple[str, ...], ...]:
        first, *middle, last = self.units
        return (("embedding", first), *((unit,) for unit in middle), (last, "head"))

    def hidden_shape(self, batch: int, sequence: int) -> tuple[int, ...]:
        return batch, sequence, 8

    def forward(self, x: Tensor, **extras: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return x


class Sleepy(Plugin):
    """The model."""

    api = (1, 0)

    @section
    class Config:
        parts: int = RANKS

    @hookimpl
    def build_model(self, job: Any) -> nn.Module:
        return Sleeping(self.config.parts)


def step_seconds(folder: str, schedule: str) -> float:
    """On one rank: the least that a step took."""
    settings = {
        "parallel.pp": RANKS, "pp.schedule": schedule, "train.global_batch": MICRO_BATCHES, "train.micro_batch": 1,
        "sleepy.parts": RANKS * RULES[schedule].parts[0], "train.sequence": 16,
        "train.evaluate_every": 0, "checkpoint.every": 0, "log.every": 1,
    }  # fmt: skip
    run = run_forge((Sleepy, "pp"), settings, steps=STEPS, folder=Path(folder), name=schedule)
    return min(line["step_seconds"] for line in run.metrics[1:])


def main() -> int:
    """Measure all schedules; 1 if one is off."""
    worst = 0.0
    print(f"{'schedule':<24}{'measured':>10}{'simulated':>11}{'apart':>8}")
    with tempfile.TemporaryDirectory() as folder, Pool(Path(folder), RANKS) as pool:
        for schedule, rule in RULES.items():
            parts = RANKS * rule.parts[0]
            share = RANKS / parts
            table = named(schedule)(RANKS, rule.parts[0], MICRO_BATCHES)
            expected = simulate(table, [PartCost(FORWARD * share, INPUT * share, WEIGHT * share)] * parts).duration
            measured = max(pool.run("timelines:step_seconds", RANKS, folder=folder, schedule=schedule))
            apart = measured / expected - 1
            worst = max(worst, abs(apart))
            print(f"{schedule:<24}{measured:>9.3f}s{expected:>10.3f}s{apart:>+8.1%}", flush=True)
    return int(worst > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
