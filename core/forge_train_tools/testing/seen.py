"""A run of the test kit, looked at from inside."""

from __future__ import annotations

from forge_train.contract.events import Update
from forge_train.step.step import Stepper, Watcher


class Seen(Watcher):
    """Watcher that keeps a run's stepper and can stop the run at a step."""

    stepper: Stepper | None = None

    def __init__(self, stop_at: int | None) -> None:
        self._stop_at = stop_at

    def on_assembled(self, stepper: Stepper) -> None:
        self.stepper = stepper

    def on_backward(self, update: Update) -> Update:
        if self.stepper and update.step == self._stop_at:
            self.stepper.job.control.stop("stop_at")
        return update
