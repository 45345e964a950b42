"""Saves a checkpoint before the job's time limit."""

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
    """Under Slurm, saves and stops with exit code 75 before the job's time limit.

    The time limit is `SLURM_JOB_END_TIME`, or else comes from `squeue`. The run stops when the time left is less than
    `save_before` plus the longest step plus the longest save; all ranks stop at the same step. Signals need no plugin:
    SIGTERM, SIGUSR1 and Ctrl-C always save a checkpoint and stop the run.
    """

    api = (1, 0)
    layout = True

    @section
    class Config:
        save_before: Annotated[float, Ge(0), Volatile()] = 120.0
        """The checkpoint is to be saved this many seconds before the end of the job."""

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
