"""Dynamic loss scaling for fp16."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from forge_train import DivergedError, Ge, Gt, Plugin, Problem, hookimpl, section
from forge_train.contract.events import Update
from forge_train.contract.protocols import LossScale

if TYPE_CHECKING:
    from forge_train import Job
    from forge_train.config import Config as RunConfig


class LossScaler(Plugin):
    """Scales the loss so that small gradients survive fp16, and skips steps that overflow (arXiv:1710.03740, §3.2).

    A step whose gradients are not finite is skipped, and the scale halved; after `growth` good steps in a row it
    doubles. Works with `train.precision = "fp16"` only: the other dtypes have the range of fp32.
    """

    api = (1, 0)
    facts = {"check.example": ("train.precision=fp16",)}

    @section
    class Config:
        initial: Annotated[float, Ge(1)] = 65536.0
        """The scale of the first step."""
        growth: Annotated[int, Gt(0)] = 2000
        """Good steps in a row after which the scale doubles."""

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._scale = DynamicScale(config.initial, config.growth)

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        if config.train.precision != "fp16":
            yield Problem(
                "train.precision",
                f"is {config.train.precision!r}, which needs no loss scale; remove loss_scaler, or say 'fp16'.",
            )

    @hookimpl
    def loss_scale(self, job: Job) -> LossScale:
        return self._scale

    @hookimpl
    def on_gradients(self, update: Update) -> None:
        """Skip the step if its gradients are not finite; the norm, equal on all ranks, knows."""
        if not math.isfinite(float(update.grad_norm)):
            self._scale.overflow(update.step)
            update.veto("the gradients overflow fp16")


class DynamicScale:
    """A factor that halves on overflow and doubles after `growth` good steps in a row."""

    def __init__(self, initial: float, growth: int) -> None:
        self._factor, self._growth = initial, growth
        self._good = 0
        self._overflowed = False

    def scale(self) -> float:
        return self._factor

    def overflow(self, step: int) -> None:
        """The gradients of this step are not finite.

        Raises:
            DivergedError: if they overflow without any scale.
        """
        if self._factor <= 1.0:
            raise DivergedError(
                f"Training diverged: at step {step} the gradients overflow fp16 at a loss scale of {self._factor:g}; "
                "try bf16, a lower learning rate, or more warm-up."
            )
        self._overflowed = True

    def update(self, skipped: bool) -> None:
        if self._overflowed:
            self._factor, self._good = max(self._factor / 2, 1.0), 0
        elif not skipped:  # a step that another plugin skipped says nothing about the scale
            self._good += 1
            if self._good == self._growth:
                self._factor, self._good = self._factor * 2, 0
        self._overflowed = False

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self._factor, "good": self._good}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._factor, self._good = state["factor"], state["good"]
