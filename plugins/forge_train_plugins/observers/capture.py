"""Activations of chosen steps, as files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

from forge_train import CheckpointEvent, Ge, Gt, Job, Model, Plugin, Problem, StepResult, hookimpl, section
from forge_train.contract.protocols import Span, SpanName

if TYPE_CHECKING:
    from forge_train.config import Config as RunConfig
    from forge_train_kit.activations import Recorder


class Capture(Plugin):
    """Writes the outputs of modules in chosen steps and evaluations, for all samples and positions, on any layout.

    A file `artifacts/capture/step-00000010.safetensors` holds what one process would have computed:
    `layers.0.attention` is `[samples, tokens, features]`, in the order of the data. `input_ids`, `position_ids` and
    `sample_ids` say what each row is of. No number of the run changes. Rank 0 holds all that a step captures: `reduce`
    keeps less.
    """

    api = (1, 0)
    layout = True
    facts = {"check.example": ("capture.modules=['*']", "capture.steps=[1]")}

    @section
    class Config:
        modules: tuple[str, ...] = ()
        """Patterns of modules, each of which must match: `layers.*.attention`; `*` stands for dots too."""
        steps: tuple[Annotated[int, Gt(0)], ...] = ()
        """Training steps."""
        every: Annotated[int, Ge(0)] = 0
        """Further training steps: each that this divides; 0 for none."""
        evaluation: bool = False
        """Capture the held-out batches of each evaluation."""
        reduce: Literal["none", "mean", "last", "norm"] = "none"
        """Keep everything; the mean over the tokens of a sample, or its last token, `[samples, features]`; or the
        2-norm of each token, `[samples, tokens]`."""

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._job: Job | None = None
        self._recorder: Recorder | None = None
        self._step = 0
        """The last one that was done."""

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        own, train = self.config, config.train
        if not own.modules:
            yield Problem("capture.modules", "names no module; write patterns such as ['layers.*.attention'].")
        if not (own.steps or own.every or own.evaluation):
            yield Problem("capture.steps", "names no step; set it, capture.every or capture.evaluation.")
        late = [step for step in own.steps if step > train.total_steps]
        if late:
            yield Problem("capture.steps", f"{late[0]} is after the last step of the run, {train.total_steps}.")
        if own.every > train.total_steps:
            yield Problem("capture.every", f"{own.every} is more than the run's {train.total_steps} steps.")
        if own.evaluation and not train.evaluate_every:
            yield Problem("capture.evaluation", "needs evaluations; set train.evaluate_every.")

    @hookimpl
    def on_start(self, job: Job, model: Model) -> None:
        import logging

        from forge_train_kit.activations import Recorder

        self._job = job
        self._recorder = Recorder(model, job, self.config.modules, key="capture.modules", reduce=self.config.reduce)
        if (names := self._recorder.by_routing) and job.dist.main:
            logging.getLogger("forge_train").warning(
                "capture leaves out %d modules of experts, such as %s: their rows are tokens by routing, and not by "
                "position. The layers around them are captured.",
                len(names),
                names[0],
            )

    @hookimpl
    def around(self, span: SpanName) -> Span | None:
        if span == "forward_backward":
            return lambda: self._recording(self._due(self._step + 1))
        return self._evaluating if span == "evaluate" and self.config.evaluation else None

    @hookimpl
    def on_checkpoint(self, event: CheckpointEvent) -> None:
        if event.kind == "loaded":
            self._step = event.step

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        self._step = step.step
        if self._due(step.step):
            self._write(f"step-{step.step:08d}")

    def _due(self, step: int) -> bool:
        own = self.config
        return step in own.steps or bool(own.every and step % own.every == 0)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        with self._recording(True):
            yield
        if self._recorder is not None:  # which a run has, and not what evaluates it afterwards
            self._write(f"evaluation-{self._step:08d}")

    def _recording(self, on: bool) -> AbstractContextManager[None]:
        from ._capture import recording

        return recording(self._recorder, on)

    def _write(self, name: str) -> None:
        from ._capture import write

        assert self._recorder is not None
        assert self._job is not None
        found = self._recorder.take()
        file = self._job.dist.on_main(lambda: write(found, self._job, name, self.config.reduce) if found else None)
        if file is not None and self._job.dist.main:
            self._job.record(file, self)
