"""The events among the hooks: whoever implements one is told, in order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from .calls import Calls
from .events import CheckpointEvent, Evaluation, Finished, LogRecord, StepResult, Update

if TYPE_CHECKING:
    import torch

    from .job import Job
    from .model import Model


class Events(ABC):
    """One method for each event; `only` is the one plugin to tell, for tools that tell them one by one."""

    _calls: Calls

    @property
    @abstractmethod
    def job(self) -> Job: ...

    def implementers(self, hook: str) -> list[str]:
        """Names of the plugins that implement a hook."""
        return [owner.name for owner in self._calls.owners(hook)]

    def arguments(self, name: str, hook: str) -> frozenset[str]:
        """Names of the arguments that a plugin's implementation of a hook asks for."""
        return self._calls.arguments(name, hook)

    def on_start(self, model: Model, optimizer: torch.optim.Optimizer) -> None:
        self._calls.announce("on_start", {"job": self.job, "model": model, "optimizer": optimizer})

    def on_gradients(self, update: Update) -> None:
        self._calls.tell("on_gradients", "update", update)

    def on_step(self, step: StepResult) -> None:
        self._calls.tell("on_step", "step", step)

    def on_log(self, record: LogRecord) -> None:
        self._calls.tell("on_log", "record", record)

    def on_evaluate(self, evaluation: Evaluation, only: str | None = None) -> None:
        self._calls.tell("on_evaluate", "evaluation", evaluation, only)

    def on_checkpoint(self, event: CheckpointEvent, only: str | None = None) -> None:
        self._calls.tell("on_checkpoint", "event", event, only)

    def on_finish(self, finished: Finished) -> None:
        self._calls.tell("on_finish", "finished", finished)

    def on_error(self, error: BaseException) -> None:
        self._calls.tell("on_error", "error", error)
