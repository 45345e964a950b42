"""Between steps: throughput, memory and the lines of metrics.jsonl; and garbage collections, the same on every rank."""

from __future__ import annotations

import gc
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..contract.events import StepResult, plain
from ..plugin.job import Job


class Meter:
    """Measures between two logged steps; evaluations and checkpoints are left out."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._since = 0.0
        self._tokens = 0
        self._step = 0
        self._waited = 0.0

    def start(self, tokens: int, step: int) -> None:
        """Begin a measurement where the run is."""
        self._since, self._tokens, self._step = time.perf_counter(), tokens, step

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the block out."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - began

    def line(self, result: StepResult, waited: float = 0.0) -> dict[str, Any]:
        """A line of metrics.jsonl for a step; waits for the device. `waited` is the time in the loader so far."""
        loss, norm = float(result.loss), float(result.grad_norm)
        seconds = max(time.perf_counter() - self._since, 1e-9)
        tokens, steps = result.tokens - self._tokens, max(result.step - self._step, 1)
        self.start(result.tokens, result.step)
        line: dict[str, Any] = {
            "step": result.step,
            "tokens": result.tokens,
            "loss": loss,
            "grad_norm": norm,
            "lr": result.lr,
            "tokens_per_second": tokens / seconds,
            "step_seconds": seconds / steps,
            "memory_gib": memory_gib(self._job.device),
            "data_wait": min((waited - self._waited) / seconds, 1.0),
        }
        self._waited = waited
        for key, value in result.metrics.items():
            line[key] = None if value is None else plain(value)
        if result.timings:
            line["timing"] = sorted(result.timings)
        return line


def memory_gib(device: torch.device) -> float:
    """Peak memory: of the device's tensors on CUDA, of the whole process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


YOUNG = 50
"""Steps between collections of what was made lately."""
ALL = 1000
"""Steps between collections of everything."""


@contextmanager
def scheduled_collections(*, active: bool) -> Iterator[None]:
    """Leave collections to `collect` within the block, which makes them between steps of a fixed number.

    Python collects when a rank has made enough objects, which differs between ranks: one stops for a tenth of a second,
    and all others wait for it in the next collective.

    Args:
        active: whether to do so; else the block changes nothing.
    """
    before = gc.isenabled()
    if active:
        gc.collect()
        gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def collect(step: int) -> None:
    """Collect after this step, if it is its turn and Python itself collects nothing."""
    if gc.isenabled():
        return
    if step % ALL == 0:
        gc.collect()
    elif step % YOUNG == 0:
        gc.collect(1)
