"""Measures kernels, and remembers the results."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge_train import Job
from forge_train_kit.capabilities import KernelCapabilities
from forge_train_kit.layers import AttentionKernel, AttentionOptions
from forge_train_kit.model import DroppedWeights

from .choice import Choice

HEADS, KV_HEADS = 8, 2
"""Head counts in the measurement, because a kernel does not know the model's. They hardly change the ranking."""
MOST_TOKENS = 8192
"""The most tokens measured at once, so that a dense mask of a long row takes neither minutes nor all memory."""
DOCUMENTS = 8
"""Number of documents in a row."""
REPEATS, SECONDS = 3, 0.5
"""Least number of calls of a kernel, and seconds for more of them: other work on the machine slows some calls down."""


def fastest(choice: Choice, job: Job, folder: str) -> tuple[str, str]:
    """The kernel to take, and a clause that says why."""
    able = choice.able()
    if len(able) == 1:
        return able[
            0
        ], f"the only one of {', '.join((*choice.kernels, *choice.refused))} that can do what the run needs"
    rivals = able if able[-1] != list(choice.kernels)[-1] else able[:-1]
    shape = Shape(job, choice.needs)
    file = cached(folder, {**shape.facts(), "kernels": rivals})
    times, how = _recall(file, rivals), f"measured before, {file}"
    if times is None:
        times, how = {}, "measured now"
        for name in rivals:
            times[name] = measure(choice.kernels[name], shape, best=min(times.values(), default=math.inf))
        _remember(file, times)
    name = min(rivals, key=lambda one: times[one])
    if math.isinf(times[name]):
        return able[-1], f"{', '.join(rivals)} failed when measured"
    told = ", ".join(f"{one} {_told(times[one])}" for one in sorted(rivals, key=lambda one: times[one]))
    return name, f"{told} for {shape} ({how})"


class Shape:
    """Measured shape: the run's sequence, rows, dtype, head size and required kernel capabilities."""

    def __init__(self, job: Job, needs: KernelCapabilities) -> None:
        train = job.config.train
        self.device, self.needs, self.dtype = job.device, needs, job.precision.compute
        self.sequence = min(train.sequence, MOST_TOKENS)
        self.rows = max(1, min(train.micro_batch, MOST_TOKENS // self.sequence))
        self.head_dim = max(needs.head_dims, default=64)

    def __str__(self) -> str:
        return f"{self.rows} × {self.sequence:,} tokens, heads of {self.head_dim} features"

    def facts(self) -> dict[str, Any]:
        """Everything that the times depend on."""
        cuda = self.device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name(self.device) if cuda else f"{platform.machine()}, {os.cpu_count()}",
            "threads": 0 if cuda else torch.get_num_threads(),
            "torch": torch.__version__,
            "shape": [self.rows, self.sequence, HEADS, KV_HEADS, self.head_dim, str(self.dtype)],
            "needs": repr(self.needs),
        }

    def draw(self) -> tuple[list[Tensor], AttentionOptions]:
        """Query, key and value, and the options. Leaves torch's global random state unchanged."""
        generator = torch.Generator(self.device).manual_seed(0)

        def normal(heads: int) -> Tensor:
            shape = (self.rows, self.sequence, heads, self.head_dim)
            return torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype, requires_grad=True)

        asked: dict[str, Any] = {}
        if self.needs.documents:
            positions = torch.arange(self.sequence, device=self.device)
            asked["document_ids"] = (positions * DOCUMENTS // self.sequence).expand(self.rows, -1).contiguous()
        if self.needs.windows:
            asked["window"] = max(1, self.sequence // 4)
        if self.needs.prefixes:
            ends = (torch.arange(self.sequence, device=self.device) < self.sequence // 4) * (self.sequence // 4)
            asked["prefix_ends"] = ends.expand(self.rows, -1).contiguous()
        if self.needs.soft_caps:
            asked["soft_cap"] = 30.0
        if self.needs.sinks:
            asked["sinks"] = torch.zeros(HEADS, device=self.device, dtype=self.dtype, requires_grad=True)
        if self.needs.dropout:
            numbers = torch.arange(max(self.rows, HEADS), dtype=torch.int32, device=self.device)
            asked["dropout"] = DroppedWeights(0.1, numbers[: self.rows], numbers[:HEADS])
        if self.needs.log_sum_exp:
            asked["log_sum_exp"] = True
        return [normal(HEADS), normal(KV_HEADS), normal(KV_HEADS)], AttentionOptions(**asked)


def measure(kernel: AttentionKernel, shape: Shape, best: float = math.inf) -> float:
    """Seconds of the fastest forward and backward pass; infinite for a kernel that fails at this shape.

    A kernel that takes more than three times the best time so far is not called again.
    """
    least = math.inf
    with torch.device(shape.device), torch.enable_grad():
        given, options = shape.draw()
        try:
            began = time.perf_counter()
            for turn in itertools.count():
                _wait(shape.device)
                started = time.perf_counter()
                if turn > REPEATS and started - began > SECONDS:
                    break
                out = kernel(given[0], given[1], given[2], options)
                out = out[0] if isinstance(out, tuple) else out
                torch.autograd.grad(out.sum(), given)
                _wait(shape.device)
                if turn:  # the first call compiles and fills caches
                    least = min(least, time.perf_counter() - started)
                    if least > 3 * best:
                        break
        except (RuntimeError, ValueError):  # out of memory, or an unsupported shape
            return math.inf
    return least


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _told(seconds: float) -> str:
    return "fails" if math.isinf(seconds) else f"{seconds * 1e3:.3g} ms"


def cached(folder: str, facts: dict[str, Any]) -> Path:
    """The file that stores the times under these facts."""
    home = os.environ.get("XDG_CACHE_HOME")
    default = (Path(home) if home else Path.home() / ".cache") / "forge-train" / "attention"
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return (Path(folder).expanduser() if folder else default) / f"{name}.json"


def _recall(file: Path, names: list[str]) -> dict[str, float] | None:
    """The stored times; None if the file does not exist or holds something else."""
    try:
        times = json.loads(file.read_text(encoding="utf-8"))
        found = {name: math.inf if times[name] is None else float(times[name]) for name in names}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if all(one > 0 for one in found.values()) and min(found.values()) < math.inf else None


def _remember(file: Path, times: dict[str, float]) -> None:
    """Write the file completely or not at all; the last writer wins. After a failure, the next run measures again."""
    text = json.dumps({name: None if math.isinf(one) else one for name, one in times.items()})
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=".tmp-", delete=False) as part:
            part.write(text)
        Path(part.name).replace(file)
