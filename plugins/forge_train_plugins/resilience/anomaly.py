"""Handles steps whose loss or gradients are abnormal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from forge_train import (
    BatchPhase,
    CheckpointEvent,
    Ge,
    Gt,
    Job,
    Model,
    Plugin,
    PrepareBatch,
    Problem,
    StepResult,
    Update,
    hookimpl,
    section,
)
from forge_train.contract.protocols import Span, SpanName

if TYPE_CHECKING:
    from ._anomaly.guard import Guard

Policy = Literal["warn", "skip", "roll_back", "stop"]


class Anomaly(Plugin):
    """Detects losses and gradients that are not finite, and spikes; warns, skips the step, rolls back or stops.

    All ranks judge the same reduced numbers, so all act alike. `warn` changes nothing. `skip` leaves out the step's
    update. `roll_back` returns the run to the newest checkpoint from before the step, repeats the steps up to it, and
    leaves its batch out. `stop` ends the run with exit code 3.

    The message names a parameter and its rank: the first whose gradient became NaN or infinite in the backward pass, or
    the one with the largest gradient. The batch is saved in the run's `artifacts/anomaly/`, as `<micro-batch>.inputs`,
    `.labels` and so on, in one safetensors file for each data-parallel rank.

    When a step is logged or saved, all steps since the last time are judged. Only with `skip` does the host wait for
    the device in each step. Gradients that overflow in fp16 are left to `loss_scaler`.
    """

    api = (1, 0)

    @section
    class Config:
        not_finite: Policy = "stop"
        """Response to a NaN or infinite loss or gradient norm. With `warn`, the run ends at the next logged
        step, as it does without this plugin."""
        spike: Policy = "warn"
        """Response to a loss or gradient norm far above that of the last steps."""
        threshold: Annotated[float, Gt(0)] = 6.0
        """A spike is above median + threshold × median absolute deviation / 0.6745; 6 is six standard deviations."""
        window: Annotated[int, Ge(8)] = 128
        """Steps over which the median and the deviation are taken. Spikes are included only with `spike = "warn"`."""
        warmup: Annotated[int, Ge(8)] = 32
        """Steps to collect before a step can count as a spike."""
        most: Annotated[int, Gt(0)] = 8
        """Most skipped steps in a row, or roll-backs before a checkpoint past the step; one more ends the run."""
        batches: Annotated[int, Gt(0)] = 1
        """Steps whose data a roll-back leaves out: the abnormal step and those right before it."""
        kept: Annotated[int, Ge(0)] = 8
        """Number of abnormal steps whose batches are saved; 0 saves none."""

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._made: Guard | None = None

    @property
    def _guard(self) -> Guard:
        from ._anomaly.guard import Guard

        self._made = self._made or Guard(self.config, self)
        return self._made

    @hookimpl
    def check_config(self) -> Iterator[Problem]:
        if self.config.batches > 1 and "roll_back" not in (self.config.not_finite, self.config.spike):
            yield Problem("anomaly.batches", 'has no effect where neither not_finite nor spike is "roll_back".')

    @hookimpl
    def prepare_batch(self) -> PrepareBatch | None:
        return PrepareBatch(BatchPhase.SLICE, self._guard.take) if self.config.kept else None

    @hookimpl
    def around(self, span: SpanName) -> Span | None:
        return self._guard.step if span == "step" else None

    @hookimpl
    def on_start(self, job: Job, model: Model) -> None:
        self._guard.start(job, model)

    @hookimpl
    def on_gradients(self, update: Update) -> None:
        self._guard.gradients(update)

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        self._guard.end(step)

    @hookimpl
    def on_checkpoint(self, event: CheckpointEvent) -> None:
        if event.kind == "saving":
            self._guard.settle()
        elif event.kind == "saved":
            self._guard.saved(event.step)
        elif event.kind == "loaded":
            self._guard.loaded()

    def state_dict(self) -> dict[str, Any]:
        return self._guard.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._guard.load_state_dict(state)
