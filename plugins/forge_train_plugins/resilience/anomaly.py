"""What happens at a step whose loss or gradients are abnormal."""

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
    """Watches for losses and gradients that are not finite, and for spikes, and warns, skips, rolls back or stops.

    All ranks judge the same two numbers, reduced over all of them, so they do the same. `warn` changes nothing else.
    `skip` leaves the step's update out. `roll_back` takes the run back to the newest checkpoint from before the step;
    it repeats the steps up to there and leaves the batch out. `stop` ends the run with exit code 3.

    The message names the parameter in whose gradient the backward pass met NaN or infinity first, or the largest
    gradient, and its rank. The batch is kept in the run's `artifacts/anomaly/`: `<micro-batch>.inputs`, `.labels` and
    so on in a safetensors file for each data-parallel rank.

    Steps are judged when they are logged or saved, all since the last time; only with `skip` does the host wait for
    the device in each step. A gradient that overflows fp16 is left to `loss_scaler`.
    """

    api = (1, 0)

    @section
    class Config:
        not_finite: Policy = "stop"
        """Where the loss or the gradient norm is NaN or infinite. With `warn`, the run ends at the next logged step, as
        without this plugin."""
        spike: Policy = "warn"
        """Where one of them is far above those of the last steps."""
        threshold: Annotated[float, Gt(0)] = 6.0
        """A spike is above median + threshold × median absolute deviation / 0.6745; 6 is six standard deviations."""
        window: Annotated[int, Ge(8)] = 128
        """Steps that median and deviation are taken over. Spikes count with `warn` only."""
        warmup: Annotated[int, Ge(8)] = 32
        """Steps before the first that can be a spike."""
        most: Annotated[int, Gt(0)] = 8
        """Skipped steps in a row, or roll-backs without a checkpoint past the step; one more ends the run."""
        batches: Annotated[int, Gt(0)] = 1
        """Steps whose data a roll-back leaves out: the abnormal one and those right before it."""
        kept: Annotated[int, Ge(0)] = 8
        """Abnormal steps of which the batch is kept; 0 keeps none."""

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
