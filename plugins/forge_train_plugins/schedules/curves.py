"""Schedules of learning rates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

from forge_train import Ge, Gt, Le, Lt, Plugin, Problem, Schedule, hookimpl, section

from ._curves import DecayPlugin, DecaySection, Shape, Unit, WarmUpPlugin, WarmUpSection, fall, in_steps, progress

if TYPE_CHECKING:
    import torch

    from forge_train import Job
    from forge_train.config import Config as RunConfig


class Cosine(DecayPlugin):
    """Linear warm-up, then half a cosine down to a floor (Loshchilov and Hutter 2016, arXiv:1608.03983)."""

    name = "cosine"

    @section
    class Config(DecaySection):
        """Warm-up and floor."""

    config: Config

    def shape(self, done: float) -> float:
        return fall("cosine", done)


class Linear(DecayPlugin):
    """Linear warm-up, then a straight line down to a floor."""

    name = "linear"

    @section
    class Config(DecaySection):
        """Warm-up and floor."""

    config: Config

    def shape(self, done: float) -> float:
        return fall("linear", done)


class Polynomial(DecayPlugin):
    """Linear warm-up, then (1 − t)^power down to a floor, t being the share of the way that is done."""

    name = "polynomial"

    @section
    class Config(DecaySection):
        power: Annotated[float, Gt(0)] = 2.0
        """1 is a line; more comes down sooner."""

    config: Config

    def shape(self, done: float) -> float:
        return float((1 - done) ** self.config.power)


class REX(DecayPlugin):
    """Linear warm-up, then (1 − t) / (1 − βt) down to a floor, by Chen et al. (2021, arXiv:2107.04197)."""

    name = "rex"

    @section
    class Config(DecaySection):
        beta: Annotated[float, Ge(0), Lt(1)] = 0.5
        """0 is a line; more stays high for longer."""

    config: Config

    def shape(self, done: float) -> float:
        return (1 - done) / (1 - self.config.beta * done)


class InverseSqrt(WarmUpPlugin):
    """Linear warm-up, then √(warm-up / step), whatever the run's length (Vaswani et al. 2017, arXiv:1706.03762)."""

    name = "inverse_sqrt"

    @section
    class Config(WarmUpSection):
        """Warm-up, which also sets how fast the rate comes down."""

    config: Config

    def after(self, step: int, warmup: int, config: RunConfig) -> float:
        return math.sqrt((warmup + 1) / (step + 1))


class Constant(WarmUpPlugin):
    """Linear warm-up, then the peak to the end."""

    name = "constant"

    @section
    class Config(WarmUpSection):
        """Warm-up."""

    config: Config

    def after(self, step: int, warmup: int, config: RunConfig) -> float:
        return 1.0


class WSD(WarmUpPlugin):
    """Linear warm-up, then the peak, and a decay at the end of the run (Hu et al. 2024, arXiv:2404.06395).

    Until the decay begins, nothing depends on the run's length: from any checkpoint before it, a run can branch off
    that decays there, or runs longer.
    """

    name = "wsd"

    @section
    class Config(WarmUpSection):
        decay: Annotated[float, Gt(0)] = 0.2
        """Length of the decay, in `unit`; below 1, as a share of the run."""
        shape: Shape = "sqrt"
        """Shape of the decay: linear, cosine, or sqrt, which is 1 − √t."""
        floor: Annotated[float, Ge(0), Le(1)] = 0.0
        """The learning rate at the end, as a share of the peak."""

    config: Config

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        steps, unit = config.train.total_steps, self.config.unit
        warmup = in_steps(self.config.warmup, unit, config)
        decay = in_steps(self.config.decay, unit, config, at_end=True)
        if steps and not decay:
            yield Problem("wsd.decay", f"{self.config.decay:g} {unit} are less than one step.")
        if steps and warmup + decay > steps:
            yield Problem(
                "wsd.decay",
                f"a warm-up of {warmup:,} steps and a decay of {decay:,} do not fit into the run's {steps:,} steps.",
            )

    def after(self, step: int, warmup: int, config: RunConfig) -> float:
        steps = config.train.total_steps
        decay = in_steps(self.config.decay, self.config.unit, config, at_end=True)
        done = progress(step, steps - decay, steps)
        return self.config.floor + (1 - self.config.floor) * fall(self.config.shape, done)


class Piecewise(Plugin):
    """Phases, each from where the last one ended to a share of its own; after them, the last share."""

    api = (1, 0)

    @section
    class Config:
        start: Annotated[float, Ge(0)] = 0.01
        """Share of the peak learning rate at the first step."""
        until: tuple[Annotated[float, Gt(0)], ...] = (0.1, 1)
        """End of each phase, in `unit`; up to 1, as a share of the run."""
        to: tuple[Annotated[float, Ge(0)], ...] = (1, 0.1)
        """The share of the peak there."""
        curve: tuple[Shape, ...] = ()
        """Curve of each phase: linear, cosine, or sqrt, which is fast at first. Empty is linear for all."""
        unit: Unit = "steps"
        """Unit of `until`: steps, or tokens rounded to whole steps."""

    config: Config

    @hookimpl
    def lr_schedule(self, optimizer: torch.optim.Optimizer, job: Job) -> Schedule:
        from torch.optim.lr_scheduler import LambdaLR

        config = self.config
        ends = [0, *self._ends(job.config)]
        shares = [config.start, *config.to]
        line: Shape = "linear"
        curves = config.curve or (line,) * len(config.to)
        phases = list(zip(pairwise(ends), pairwise(shares), curves, strict=True))

        def factor(step: int) -> float:
            for (first, last), (begin, end), curve in phases:
                if step < last:
                    return end + (begin - end) * fall(curve, progress(step, first, last))
            return shares[-1]

        return LambdaLR(optimizer, factor)

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        mine = self.config
        if not mine.until:
            yield Problem("piecewise.until", "there is no phase; write where each ends, as in [0.1, 1].")
        for key, values in (("to", mine.to), ("curve", mine.curve or mine.until)):
            if len(values) != len(mine.until):
                yield Problem(
                    f"piecewise.{key}", f"expected one for each of the {len(mine.until)} phases, found {len(values)}."
                )
        if not any((mine.start, *mine.to)):
            yield Problem("piecewise.to", "the learning rate is 0 throughout.")
        steps, ends = config.train.total_steps, [0, *self._ends(config)]
        if not steps:
            return
        for number, (first, last) in enumerate(pairwise(ends), 1):
            before, until = (0.0, *mine.until)[number - 1 : number + 1]
            rounded = before < until <= 1  # a short run may have no whole step of a share
            if last < first or (last == first and not rounded):
                yield Problem(
                    "piecewise.until", f"phase {number} ends at step {last:,}, where it begins, or before ({first:,})."
                )
        if ends[-1] > steps:
            yield Problem(
                "piecewise.until", f"the last phase ends at step {ends[-1]:,}, after the run ({steps:,} steps)."
            )

    def _ends(self, config: RunConfig) -> list[int]:
        """The step at which each phase ends."""
        return [
            round(until * config.train.total_steps) if until <= 1 else in_steps(until, self.config.unit, config)
            for until in self.config.until
        ]
