"""torch.profiler over some steps, and what it leaves."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from forge_train import Job
from forge_train.contract.protocols import SpanName

log = logging.getLogger("forge_train")


class Window:
    """The profiled steps.

    Args:
        job: the run.
        config: `[profile]`.
    """

    def __init__(self, job: Job, config: Any) -> None:
        self._job, self._config, self._step = job, config, 0
        self._profiler: profile | None = None

    @contextmanager
    def span(self, name: SpanName) -> Iterator[None]:
        first = self._config.start
        if name == "step":
            self._step += 1
            if self._step == first:
                self._begin()
        if self._profiler is None:
            yield
            return
        with self._marked(name):
            yield
        if name == "step" and self._step == first + self._config.steps - 1:
            self._end()

    @contextmanager
    def _marked(self, name: str) -> Iterator[None]:
        device = self._job.device.type == "cuda"
        if device:
            torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
        try:
            with record_function(f"forge {name}"):
                yield
        finally:
            if device:
                torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def _begin(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._job.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(
            activities=activities,
            record_shapes=self._config.shapes,
            profile_memory=self._config.memory,
            acc_events=True,
        )
        self._profiler.start()

    def _end(self) -> None:
        assert self._profiler is not None
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        rank, run = self._job.dist.rank, self._job.run
        trace, report = run.artifact(f"profile/trace-rank-{rank}.json.gz"), run.artifact(f"profile/rank-{rank}.txt")
        profiler.export_chrome_trace(str(trace))
        key = "self_device_time_total" if self._job.device.type == "cuda" else "self_cpu_time_total"
        first = self._config.start
        title = (
            f"{self._config.steps} steps from step {first} after the start, on rank {rank} ({self._job.device.type})"
        )
        table = profiler.key_averages().table(sort_by=key, row_limit=self._config.rows, max_name_column_width=60)
        report.write_text(f"{title}\n\n{table}\n", encoding="utf-8")
        for file in (trace, report):
            self._job.record(file, self)
        if rank == 0:
            log.info("The profile of %s is in %s.", title, run.dir / "artifacts" / "profile")

    def check(self) -> None:
        """Say so where there were too few steps."""
        last = self._config.start + self._config.steps - 1
        if self._step < last and self._job.dist.main:
            log.warning("There is no profile: it needs %d steps, and there were %d (profile.start).", last, self._step)
