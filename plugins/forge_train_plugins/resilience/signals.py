"""A checkpoint before the job's time is over."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Annotated, Any

from forge_train import Ge, Job, Plugin, StepResult, Volatile, hookimpl, section
from forge_train.contract.protocols import Span, SpanName

log = logging.getLogger("forge_train")


class Signals(Plugin):
    """Under Slurm, saves and stops with exit code 75 before the job's time is over.

    The end is `SLURM_JOB_END_TIME`, or what `squeue` says. The run stops when what is left is less than `save_before`,
    the longest step and the longest save together; that is known to all ranks at the same step. Signals need no
    plugin: SIGTERM, SIGUSR1 and Ctrl-C always stop a run with a checkpoint.
    """

    api = (1, 0)
    layout = True

    @section
    class Config:
        save_before: Annotated[float, Ge(0), Volatile()] = 120.0
        """Seconds before the end of the job by which the checkpoint is to be saved."""

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._job: Job | None = None
        self._end: float | None = None
        self._longest: dict[str, float] = {"step": 0.0, "save": 0.0}

    @hookimpl
    def on_start(self, job: Job) -> None:
        from ._signals import end_of_job

        self._job = job
        if not job.dist.main:
            return
        self._end = end_of_job()
        if self._end is None:
            log.warning("signals: Slurm does not say when this job ends, so the run saves when a signal comes.")

    @hookimpl
    def around(self, span: SpanName) -> Span | None:
        return self._timed(span) if span in self._longest else None

    def _timed(self, span: str) -> Callable[[], AbstractContextManager[None]]:
        @contextmanager
        def timed() -> Iterator[None]:
            began = time.monotonic()
            yield
            self._longest[span] = max(self._longest[span], time.monotonic() - began)

        return timed

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        if self._job is None or self._end is None:
            return
        left = self._end - time.time()
        if left < self.config.save_before + sum(self._longest.values()):
            self._job.control.stop(f"the Slurm job ends in {max(left, 0):.0f} s")
