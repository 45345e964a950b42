"""Host timers of the spans of a step, and memory, over ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from forge_train import Job, Metric
from forge_train.contract.protocols import SpanName
from forge_train.step.aggregate import memory_gib

PARTS = ("data", "forward_backward", "optimizer", "other", "save", "evaluate")
ON_DEVICE = ("step", "forward_backward", "optimizer")
"""Spans that a CUDA device times, too."""


class PerRank(Metric):
    """A mean for each rank, of which the largest is named.

    Args:
        ranks: how many there are.
    """

    timing = True
    per_rank = True

    def __init__(self, ranks: int) -> None:
        super().__init__(sums=2 * ranks)
        self._ranks = ranks

    def update(self, rank: int, total: float, count: float) -> None:
        """Add a total and its count for one rank."""
        self.sums[rank].add_(total)
        self.sums[self._ranks + rank].add_(count)

    def value(self, sums: Tensor, maxima: Tensor) -> float | Mapping[str, float]:
        totals, counts = sums.view(2, -1)
        there = counts.nonzero().flatten()
        means = (totals / counts)[there]
        if len(there) == 1:
            return float(means[0])
        return {"mean": float(means.mean()), "max": float(means.max()), "rank": int(there[means.argmax()])}


class DeviceTimer:
    """Measures device time of spans between two events in the CUDA stream; nothing waits for them until `take`.

    Args:
        event: makes an event.
    """

    def __init__(self, event: Callable[[], Any]) -> None:
        self._event = event
        self._timed: list[tuple[str, Any, Any]] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        begin, end = self._event(), self._event()
        begin.record()
        try:
            yield
        finally:
            end.record()
            self._timed.append((name, begin, end))

    def take(self) -> list[tuple[str, float]]:
        """Seconds of each span since the last time; waits for the device."""
        timed, self._timed = self._timed, []
        if timed:
            timed[-1][2].synchronize()
        return [(name, begin.elapsed_time(end) / 1e3) for name, begin, end in timed]


class Clock:
    """Counts for the plugin between two logged steps."""

    def __init__(self, job: Job) -> None:
        self._job, self._began, self._inside = job, 0.0, 0.0
        self._spent: dict[str, list[float]] = {}
        self._device: DeviceTimer | None = None
        names = [f"{part}_seconds" for part in PARTS] + ["host_gib"]
        if job.device.type == "cuda":
            self._device = DeviceTimer(lambda: torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            names += [f"{span}_device_seconds" for span in ON_DEVICE]
            names += ["allocated_gib", "reserved_gib", "peak_gib", "retries"]
        self.metrics = {name: PerRank(job.dist.world) for name in names}

    @contextmanager
    def span(self, name: SpanName) -> Iterator[None]:
        began = time.perf_counter()
        if name == "step":
            self._began, self._inside = began, 0.0
        elif name == "forward_backward":
            self._add("data", began - self._began)
        device = self._device if name in ON_DEVICE else None
        try:
            with device.span(name) if device else nullcontext():
                yield
        finally:
            spent = time.perf_counter() - began
            self._add(name if name != "step" else "other", spent - (self._inside if name == "step" else 0.0))

    def _add(self, part: str, seconds: float) -> None:
        total = self._spent.setdefault(part, [0.0, 0])
        total[0] += seconds
        total[1] += 1
        self._inside += seconds

    def step(self, number: int) -> None:
        """At a logged step, hand everything over."""
        if not self._job.logs(number):
            return
        rank = self._job.dist.rank
        for part, (seconds, count) in self._spent.items():
            self.metrics[f"{part}_seconds"].update(rank, seconds, count)
        self._spent.clear()
        for span, seconds in self._device.take() if self._device else ():
            self.metrics[f"{span}_device_seconds"].update(rank, seconds, 1)
        for name, gib in self._memory().items():
            self.metrics[name].update(rank, gib, 1)

    def _memory(self) -> dict[str, float]:
        device = self._job.device
        found = {"host_gib": memory_gib(torch.device("cpu"))}
        if device.type == "cuda":
            stats = torch.cuda.memory_stats(device)
            kinds = {"allocated": "allocated_bytes.all.current", "reserved": "reserved_bytes.all.current"}
            kinds["peak"] = "allocated_bytes.all.peak"
            found |= {f"{name}_gib": stats[key] / 2**30 for name, key in kinds.items()}
            found["retries"] = stats["num_alloc_retries"]
        return found
