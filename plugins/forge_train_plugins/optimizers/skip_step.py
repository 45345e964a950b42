"""Steps that are left out because of their gradients."""

from __future__ import annotations

import logging
import math
import sys
from collections import deque
from typing import TYPE_CHECKING, Annotated, Any

from forge_train import DivergedError, Ge, Gt, Plugin, StepResult, Update, hookimpl, section
from forge_train_kit.outliers import limit

if TYPE_CHECKING:
    from forge_train import Job

log = logging.getLogger("forge_train")


class SkipStep(Plugin):
    """Skips steps whose gradient norm is not finite, or far above those of the last steps by a robust z-score."""

    api = (1, 0)

    @section
    class Config:
        threshold: Annotated[float, Gt(0)] = 6.0
        """Skip above median + threshold × median absolute deviation / 0.6745; 6 is six standard deviations."""
        window: Annotated[int, Ge(8)] = 128
        """Steps that median and deviation are taken over; skipped ones do not count."""
        warmup: Annotated[int, Ge(8)] = 32
        """Steps that must have been taken before one is skipped for a finite norm."""
        most: Annotated[int, Gt(0)] = 8
        """Skipped steps in a row; one more ends the run."""

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._norms: deque[float] = deque(maxlen=self.config.window)
        self._taken = self._in_row = self._skipped = 0
        self._job: Job | None = None

    @hookimpl
    def on_start(self, job: Job) -> None:
        self._job = job

    @hookimpl
    def on_gradients(self, update: Update) -> None:
        """The norm is the same to the bit on all ranks, and so is what they decide. Reading it is the one wait for the
        device in a step."""
        if update.vetoed:
            return
        norm = float(update.grad_norm)
        limit = self._limit()
        if norm <= limit:
            self._norms.append(norm)
            self._taken, self._in_row = self._taken + 1, 0
            return
        self._in_row, self._skipped = self._in_row + 1, self._skipped + 1
        above = f"above {limit:.4g}" if math.isfinite(norm) else "not finite"
        reason = f"the gradient norm is {norm:.4g}, {above}"
        if self._job is not None and self._job.dist.main:
            log.warning("Step %d is skipped: %s (%d in a row).", update.step, reason, self._in_row)
            self._job.run.event("anomaly", update.step, kind="skip_step", reason=reason)
        if self._in_row > self.config.most:
            raise DivergedError(
                f"Training diverged: at step {update.step} {reason}, after {self.config.most} skipped steps in a row "
                "(skip_step.most). Try a lower learning rate, more warm-up, or a larger skip_step.threshold."
            )
        update.veto(reason)

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        step.add("skipped", self._skipped)

    def _limit(self) -> float:
        """The largest norm that is not abnormal."""
        if self._taken < self.config.warmup:
            return sys.float_info.max  # of finite norms, any
        return limit(self._norms, self.config.threshold)

    def state_dict(self) -> dict[str, Any]:
        return {
            "norms": list(self._norms),
            "taken": self._taken,
            "in_row": self._in_row,
            "skipped": self._skipped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._norms.clear()
        self._norms.extend(state["norms"])
        self._taken, self._in_row, self._skipped = state["taken"], state["in_row"], state["skipped"]
