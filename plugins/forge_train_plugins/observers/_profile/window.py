"""torch.profiler over some steps, and what it leaves."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from forge_train import ConfigError, Job
from forge_train.contract.protocols import SpanName

from .timeline import Activity, split

log = logging.getLogger("forge_train")
HISTORY = 1_000_000
"""Allocations of a snapshot at most: the oldest are left out."""
CUDA_ONLY = {"snapshot": " There, profile.memory = true adds allocations to trace and table.", "nvtx": ""}
"""Options, and what else there is elsewhere."""


@contextmanager
def nvtx(name: str) -> Iterator[None]:
    """A range that Nsight Systems shows."""
    torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


class Window:
    """The profiled steps.

    Args:
        job: the run.
        config: `[profile]`.

    Raises:
        ConfigError: for what only a CUDA device has.
    """

    def __init__(self, job: Job, config: Any) -> None:
        if job.device.type != "cuda" and (asked := next((key for key in CUDA_ONLY if getattr(config, key)), "")):
            key = f"profile.{asked}"
            raise ConfigError(
                f"{key}: needs a CUDA device; this run's is {job.device.type}.{CUDA_ONLY[asked]}", key=key
            )
        self._job, self._config, self._step = job, config, 0
        self._profiler: profile | None = None

    @contextmanager
    def span(self, name: SpanName) -> Iterator[None]:
        with nvtx(f"forge {name}") if self._config.nvtx else nullcontext(), self._profiled(name):
            yield

    @contextmanager
    def _profiled(self, name: SpanName) -> Iterator[None]:
        first = self._config.start
        if name == "step":
            self._step += 1
            if self._step == first and self._config.steps:
                self._begin()
        if self._profiler is None:
            yield
            return
        with record_function(f"forge {name}"):
            yield
        if name == "step" and self._step == first + self._config.steps - 1:
            self._end()

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
        if self._config.snapshot:
            torch.cuda.memory._record_memory_history(max_entries=HISTORY)

    def _end(self) -> None:
        assert self._profiler is not None
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        rank, run = self._job.dist.rank, self._job.run
        trace, report = run.artifact(f"profile/trace-rank-{rank}.json.gz"), run.artifact(f"profile/rank-{rank}.txt")
        files = [trace, report]
        if self._config.snapshot:
            files.append(run.artifact(f"profile/memory-rank-{rank}.pickle"))
            torch.cuda.memory._dump_snapshot(str(files[-1]))  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
        profiler.export_chrome_trace(str(trace))
        title = f"{self._config.steps} steps from step {self._config.start} after the start"
        title += f", on rank {rank} ({self._job.device.type})"
        report.write_text(f"{title}\n{self._split(profiler)}\n{self._table(profiler)}\n", encoding="utf-8")
        for file in files:
            self._job.record(file, self)
        if rank == 0:
            log.info("The profile of %s is in %s.", title, run.dir / "artifacts" / "profile")

    def _split(self, profiler: profile) -> str:
        seen = [
            Activity(
                one.name,
                one.thread,
                one.time_range.start,
                one.time_range.end,
                one.device_type != DeviceType.CPU,
                one.is_user_annotation,
            )
            for one in profiler.events() or ()  # type: ignore[no-untyped-call]
        ]
        found = split(seen)
        return f"{found.line(self._config.steps)}\n" if found else ""

    def _table(self, profiler: profile) -> str:
        key = "self_device_time_total" if self._job.device.type == "cuda" else "self_cpu_time_total"
        table: str = profiler.key_averages().table(sort_by=key, row_limit=self._config.rows, max_name_column_width=60)
        return table

    def check(self) -> None:
        """Say so where there were too few steps."""
        last = self._config.start + self._config.steps - 1
        if self._config.steps and self._step < last and self._job.dist.main:
            log.warning("There is no profile: it needs %d steps, and there were %d (profile.start).", last, self._step)
