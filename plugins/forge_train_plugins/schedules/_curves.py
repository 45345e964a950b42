"""Base of schedules: a linear warm-up, then a curve to the end of the run."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from forge_train import Ge, Le, Plugin, Problem, Schedule, hookimpl, section

if TYPE_CHECKING:
    import torch

    from forge_train import Job
    from forge_train.config import Config as RunConfig

Unit = Literal["steps", "tokens"]
Shape = Literal["linear", "cosine", "sqrt"]


@section
class WarmUpSection:
    """Options of a schedule that warms up."""

    warmup: Annotated[float, Ge(0)] = 0.0
    """Length over which the learning rate rises to its peak, in `unit`; below 1, as a share of the run."""
    unit: Unit = "steps"
    """Unit of lengths: steps, or tokens rounded to whole steps."""


@section
class DecaySection(WarmUpSection):
    """Options of a schedule that also comes down."""

    floor: Annotated[float, Ge(0), Le(1)] = 0.1
    """The learning rate at the end, as a share of the peak."""


class WarmUpPlugin(Plugin):
    """A schedule with a linear warm-up; a subclass gives the curve after it."""

    api = (1, 0)
    name: str

    config: Any

    @hookimpl
    def lr_schedule(self, optimizer: torch.optim.Optimizer, job: Job) -> Schedule:
        from torch.optim.lr_scheduler import LambdaLR

        warmup = in_steps(self.config.warmup, self.config.unit, job.config)
        return LambdaLR(optimizer, partial(self.factor, warmup=warmup, config=job.config))

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        steps, unit = config.train.total_steps, self.config.unit
        if steps and in_steps(self.config.warmup, unit, config) >= steps:
            yield Problem(
                f"{self.name}.warmup",
                f"{self.config.warmup:g} {unit} leave none of the run's {steps:,} steps to train at.",
            )

    def factor(self, step: int, *, warmup: int, config: RunConfig) -> float:
        """Share of the peak learning rate in the update after `step` others."""
        return (step + 1) / (warmup + 1) if step < warmup else self.after(step, warmup, config)

    @abstractmethod
    def after(self, step: int, warmup: int, config: RunConfig) -> float:
        """The factor from step `warmup` on, where it is 1."""


class DecayPlugin(WarmUpPlugin):
    """A schedule that comes down to a floor from the warm-up to the end of the run; a subclass gives the shape."""

    def after(self, step: int, warmup: int, config: RunConfig) -> float:
        floor: float = self.config.floor
        return floor + (1 - floor) * self.shape(progress(step, warmup, config.train.total_steps))

    @abstractmethod
    def shape(self, done: float) -> float:
        """From 1 to 0, as `done` goes from 0 to 1."""


def in_steps(length: float, unit: Unit, config: RunConfig, *, at_end: bool = False) -> int:
    """A length in steps, from one in `unit` or, below 1, in shares of the run.

    Args:
        length: from the beginning of the run.
        unit: what it counts.
        config: of the run, whose first steps may hold fewer tokens than the others.
        at_end: it is a length up to the end of the run instead.
    """
    train = config.train
    if length < 1:
        return round(length * train.total_steps)
    if unit == "steps":
        return round(length)
    if not at_end:
        return round(train.steps_of(length))
    missing = sum(phase.steps * (train.global_batch - phase.global_batch) for phase in train.batch_warmup)
    tokens = train.total_steps * train.tokens_per_step - missing * train.sequence
    return round(train.total_steps - train.steps_of(tokens - length))


def progress(step: int, first: int, last: int) -> float:
    """Return the progress from step `first` to step `last`, from 0 to 1."""
    return min(max((step - first) / max(last - first, 1), 0.0), 1.0)


def fall(shape: Shape, done: float) -> float:
    """From 1 to 0 in a line, half a cosine, or 1 − √done (Hägele et al. 2024, arXiv:2405.18392), steep at first."""
    if shape == "cosine":
        return (1 + math.cos(math.pi * done)) / 2
    return 1 - (math.sqrt(done) if shape == "sqrt" else done)
