"""Speed of training against a plain loop over the same modules, in turns."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from itertools import pairwise
from typing import Any, ClassVar

import torch

from forge_train import Job, Model, StepResult, hookimpl
from forge_train_tools import bench
from forge_train_tools.configuration.request import Request

from .case import LacksError, Row, Size

BAR = 0.95
"""Least tokens per second, as a share of the plain loop's."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "1b": ("llama3-1b", {"train.sequence": 4096, "train.micro_batch": 4, "train.global_batch": 4}),
    "8b-8-layers": ("llama3-8b", {"decoder.layers": 8, "train.micro_batch": 1, "train.global_batch": 1}),
    "8b": ("llama3-8b", {"train.sequence": 4096, "train.micro_batch": 1, "train.global_batch": 1}),
    "moe": (
        "",
        {
            "decoder.dim": 1024,
            "decoder.layers": 8,
            "decoder.heads": 16,
            "decoder.kv_heads": 4,
            "decoder.vocabulary": 32768,
            "decoder.max_sequence": 4096,
            "moe.experts": 16,
            "moe.top_k": 2,
            "moe.hidden": 1792,
            "train.sequence": 4096,
            "train.micro_batch": 4,
            "train.global_batch": 4,
            "train.precision": "bf16",
        },
    ),
}
"""Preset and values of each model."""
TOY = {
    "decoder.dim": 32,
    "decoder.layers": 1,
    "decoder.heads": 2,
    "decoder.kv_heads": 1,
    "decoder.hidden": 64,
    "decoder.vocabulary": 512,
    "decoder.max_sequence": 16,
    "train.sequence": 16,
    "train.micro_batch": 2,
    "train.global_batch": 2,
}
LAUNCHES = ("LaunchKernel", "GraphLaunch", "MemcpyAsync", "MemsetAsync")
"""Parts of the names of calls that put work on a device."""


class Measured(BaseException):
    """Ends a run without its last checkpoint, which no disk of a trial holds for 8B parameters."""


class Probe(bench.Probe):
    """Looks at single steps too: how long each takes, and how many launches."""

    made: ClassVar[list[Probe]] = []

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        Probe.made.append(self)
        self.marks: list[Any] = []
        self.turns: list[list[Any]] = []
        self.launches: dict[str, int] = {}
        self._profile: Any = None

    @hookimpl
    def on_start(self, job: Job, model: Model, optimizer: torch.optim.Optimizer) -> None:
        super().on_start(job, model, optimizer)
        self.marks = [self._mark()]

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        self.marks.append(self._mark())
        if step.step == bench.TURN + 1:  # of the second turn, whose steps are not counted
            self._start()
        elif step.step == bench.TURN + 2:
            self.launches["forge"] = self._stop()
            self._start()
            self._by_hand.step()
            self.launches["plain"] = self._stop()
        super().on_step(step)
        if step.step % bench.TURN == 0:
            if step.step > bench.WARM_UP * bench.TURN:
                self.turns.append(self.marks)
            self.marks = [self._mark()]
        if step.step == self.last:
            raise Measured

    def step_seconds(self) -> list[float]:
        """Seconds of each counted step of the engine, by the device's clock where it has one."""
        spans = [pair for turn in self.turns for pair in pairwise(turn)]
        if self._job.device.type == "cuda":
            return sorted(before.elapsed_time(after) / 1e3 for before, after in spans)
        return sorted(after - before for before, after in spans)

    def _mark(self) -> Any:
        if self._job.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _start(self) -> None:
        self._wait()
        self._profile = torch.profiler.profile()
        self._profile.start()

    def _stop(self) -> int:
        self._wait()
        self._profile.stop()
        return sum(event.count for event in self._profile.key_averages() if any(one in event.key for one in LAUNCHES))


def train(size: Size, model: str, fp8: bool = False, turns: int = 6) -> list[Row]:
    """Tokens per second, MFU, steps, memory and launches of one model."""
    preset, values = MODELS[model]
    values = {
        **values,
        **size.choose({}, {**TOY, **({"moe.hidden": 32, "moe.experts": 4} if model == "moe" else {})}),
        "run.device": size.device,
        "synthetic.isolate": False,
        "train.precision": "bf16",
    }
    values["synthetic.vocabulary"] = size.choose(32768, 512)
    plugins = ["synthetic", *(["moe"] if model == "moe" else []), *(["fp8"] if fp8 else [])]
    if not size.toy:
        plugins.append("compile")
    request = Request(
        config=preset,
        plugins=tuple(plugins),
        without=("compile",) if size.toy and preset else (),
        set=tuple(f"{key}={_word(value)}" for key, value in values.items()),
    )
    Probe.made.clear()
    Probe.product_size = size.choose(0, 64)
    if size.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with suppress(Measured):
        bench.measure(request, turns=size.choose(turns, 1), probe=f"{__name__}:Probe")
    (probe,) = Probe.made
    found = probe.result
    steps = probe.step_seconds()
    memory = torch.cuda.max_memory_allocated() / 2**30 if size.device == "cuda" else None
    name, mfu = f"{model}{', fp8' * fp8}", found.mfu
    return [
        Row(f"{name}: speed / plain loop's", f"{found.speed:.3f}", f"≥ {BAR}", size.toy or found.speed >= BAR),
        Row(f"{name}: tokens per second", f"{found.tokens_per_second:,.0f}"),
        Row(f"{name}: MFU, of the peak in bf16", "—" if mfu is None else f"{mfu:.1%}"),
        Row(f"{name}: share of a matrix product's FLOP/s", f"{found.share_of_matmul or 0:.1%}"),
        Row(f"{name}: step, p50 and p95", f"{_at(steps, 0.5):.1f} ms, {_at(steps, 0.95):.1f} ms"),
        Row(f"{name}: peak memory", "—" if memory is None else f"{memory:.1f} GiB"),
        Row(f"{name}: launches a step, forge and plain", " and ".join(map(str, probe.launches.values()))),
        Row(f"{name}: parameters", f"{found.parameters:,}"),
    ]


def torchtitan(size: Size) -> list[Row]:
    """Tokens per second of torchtitan's own trainer, by its log; how it is started differs by version.

    Raises:
        LacksError: where it is not installed, or nobody says how to start it.
    """
    if importlib.util.find_spec("torchtitan") is None:
        raise LacksError("torchtitan is not installed")
    if not (words := os.environ.get("TORCHTITAN", "")):
        raise LacksError("say how it is started, like TORCHTITAN='-m torchtitan.train …', for a model of the same size")
    done = subprocess.run([sys.executable, *shlex.split(words)], check=True, capture_output=True, text=True)
    rates = [float(one.replace(",", "")) for one in re.findall(r"tps: *([\d,.]+)", done.stdout + done.stderr)]
    if not rates:
        raise RuntimeError(f"no line of its log has `tps:`: {(done.stdout + done.stderr)[-1000:]}")
    return [Row("torchtitan: tokens per second, median of its log", f"{statistics.median(rates):,.0f}")]


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _at(steps: list[float], share: float) -> float:
    """A percentile, in milliseconds."""
    return 1e3 * steps[min(int(share * len(steps)), len(steps) - 1)]
