"""Names the rank that all others wait for, and ends the job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated, Any

from forge_train import CheckpointEvent, Gt, Job, Plugin, Problem, StepResult, Volatile, hookimpl, section
from forge_train.contract.protocols import Span, SpanName

if TYPE_CHECKING:
    from forge_train.config import Config as RunConfig

    from ._watchdog.heart import Heart

AFTER = {"forward_backward": "gradients", "optimizer": "between steps"}
"""The part of a step that follows another."""


class Watchdog(Plugin):
    """Ends a run that stalls, and names the rank that all others wait for, with the stacks of every rank.

    A thread of each rank writes a heartbeat to `log/heartbeat/rank-N.json`: the step, the part of the step, and the
    seconds since that part began. If a part takes too long, each rank writes its Python stacks and its last collectives
    (torch's flight recorder) to `log/stalled/`. The message names the rank that does not respond, else the rank that is
    furthest behind and not waiting for others. The job then ends with exit code 1, and `--max-restarts` restarts it.

    Rank 0 rewrites `log/alive.json` as long as the run makes progress, so a scheduler can check its age.
    """

    api = (1, 0)
    layout = True

    @section
    class Config:
        seconds: Annotated[float, Gt(0), Volatile()] = 300.0
        """Most seconds for one part of a step: data, forward and backward, gradients, optimizer, between steps."""
        slow_seconds: Annotated[float, Gt(0), Volatile()] = 1800.0
        """Most seconds for a part of the first step, for an evaluation, or for a save."""

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._heart: Heart | None = None
        self._step = 0

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        own = self.config
        if own.slow_seconds < own.seconds:
            yield Problem("watchdog.slow_seconds", f"must be at least watchdog.seconds ({own.seconds:g}).")
        if own.seconds >= config.run.timeout:
            limit = f"run.timeout ({config.run.timeout:g})"
            yield Problem("watchdog.seconds", f"must be below {limit}, after which collectives give up by themselves.")

    @hookimpl
    def on_start(self, job: Job) -> None:
        from ._watchdog.heart import Heart

        self._heart = Heart(job, self.config.seconds, self.config.slow_seconds)

    @hookimpl
    def around(self, span: SpanName) -> Span | None:
        def marked() -> AbstractContextManager[None]:
            if self._heart is None:
                return nullcontext()
            if span == "step":
                self._heart.begin(self._step)
                return nullcontext()
            return self._heart.during(span, AFTER.get(span, "between steps"))

        return marked

    @hookimpl
    def on_checkpoint(self, event: CheckpointEvent) -> None:
        if event.kind == "loaded":
            self._step = event.step

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        self._step = step.step
        if self._heart:
            self._heart.mark("between steps", step.step)

    @hookimpl
    def on_end(self) -> None:
        if self._heart:
            self._heart.stop()
