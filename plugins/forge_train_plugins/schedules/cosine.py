"""The default schedule of learning rates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated

from forge_train import Ge, Le, Plugin, Problem, Schedule, hookimpl, section

if TYPE_CHECKING:
    import torch

    from forge_train import Job
    from forge_train.config import Config as RunConfig


class Cosine(Plugin):
    """Linear warm-up, then half a cosine down to a floor (Loshchilov and Hutter 2016, arXiv:1608.03983)."""

    api = (1, 0)

    @section
    class Config:
        warmup: Annotated[float, Ge(0)] = 0.0
        """Steps over which the learning rate rises to its peak; below 1, their share of the run."""
        floor: Annotated[float, Ge(0), Le(1)] = 0.1
        """The learning rate at the end, as a share of the peak."""

    config: Config

    @hookimpl
    def lr_schedule(self, optimizer: torch.optim.Optimizer, job: Job) -> Schedule:
        from torch.optim.lr_scheduler import LambdaLR

        warmup = warmup_steps(self.config.warmup, job.steps)
        return LambdaLR(optimizer, partial(factor, warmup=warmup, steps=job.steps, floor=self.config.floor))

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        steps = config.train.steps
        if steps and self.config.warmup >= steps:
            yield Problem(
                "cosine.warmup", f"{self.config.warmup:g} steps leave none of train.steps ({steps}) to train at."
            )


def warmup_steps(warmup: float, steps: int) -> int:
    """A warm-up in steps, from one in steps or in a share of `steps`."""
    return round(warmup * steps) if warmup < 1 else round(warmup)


def factor(step: int, *, warmup: int, steps: int, floor: float) -> float:
    """Share of the peak learning rate in the update after `step` others, out of `steps`."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2
