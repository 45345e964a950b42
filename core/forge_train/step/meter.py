"""Throughput, memory, and the lines of metrics.jsonl."""

from __future__ import annotations

import logging
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..contract.events import StepResult, plain
from ..contract.model import Model
from ..plugin.job import Job
from .peaks import peak_flops

log = logging.getLogger("forge_train")


class Meter:
    """Measures between two logged steps; evaluations and checkpoints are left out."""

    def __init__(self, job: Job, model: Model) -> None:
        self._job = job
        stages = job.dist.gather_stages(model.flops_per_token(job.config.train.sequence))
        flops = sum(one for one in stages if one) if all(stages) else None
        peak = flops and device_peak(job) * job.dist.world
        self._flops_share = flops / peak if flops and peak else None
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
        rate = tokens / seconds
        line: dict[str, Any] = {
            "step": result.step,
            "tokens": result.tokens,
            "loss": loss,
            "grad_norm": norm,
            "lr": result.lr,
            "tokens_per_second": rate,
            "step_seconds": seconds / steps,
            "mfu": rate * self._flops_share if self._flops_share else None,
            "memory_gib": memory_gib(self._job.device),
            "data_wait": min((waited - self._waited) / seconds, 1.0),
        }
        self._waited = waited
        for key, value in result.metrics.items():
            line[key] = plain(value)
        if result.timings:
            line["timing"] = sorted(result.timings)
        return line


def device_peak(job: Job) -> float:
    """FLOP/s of this device at its peak: as configured, else by its name; 0 where neither says."""
    if configured := job.config.log.peak_tflops:
        return configured * 1e12
    if job.device.type != "cuda":
        return 0.0
    name = torch.cuda.get_device_name(job.device)
    peak = peak_flops(name, job.config.train.precision, tf32=torch.get_float32_matmul_precision() != "highest")
    if not peak and job.dist.main:
        log.warning("No mfu: the peak of %r is not known. Say it in TFLOP/s with -s log.peak_tflops=…", name)
    return peak


def memory_gib(device: torch.device) -> float:
    """Peak memory: of the device's tensors on CUDA, of the whole process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
