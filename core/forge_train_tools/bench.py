"""Measurements of this machine, on a real run: what forge's loop costs, how fast data and checkpoints are.

The engine's loop and a hand-written one take turns of a few steps, so that other load on the machine meets both alike.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from forge_train.contract.events import CheckpointEvent, StepResult
from forge_train.plugin.plugin import Plugin, hookimpl

from .by_hand import ByHand
from .configuration.request import Request
from .configuration.setup import resolve
from .facts import DISPLAY

if TYPE_CHECKING:
    import torch

    from forge_train.contract.model import Model
    from forge_train.contract.protocols import Loader
    from forge_train.plugin.job import Job

TURN = 5
"""Steps that a loop takes before the other one's turn."""
WARM_UP = 2
"""Turns of each that are not counted."""
LONG = 10_000_000
"""Steps that the configuration is told, so that no warm-up is too long for it; the probe stops the run."""
FRESH = ("train.tokens=0", "train.epochs=0", "checkpoint.only=[]", "checkpoint.folder=", "checkpoint.mirror=")


@dataclass
class Measured:
    """Measurements of a run."""

    steps: int
    tokens_per_step: int
    parameters: int
    flops_per_token: float | None
    """Those of items, such as images, included: of the hand-written loop's batches."""
    clock: Literal["CPU", "wall"] = "CPU"
    """The seconds of `engine` and `by_hand`: CPU seconds of all threads, which other work on the machine leaves alone;
    or, on an accelerator, whose work they do not count, wall seconds until the device is done."""
    engine: list[float] = field(default_factory=list)
    """Seconds of each turn of the engine."""
    by_hand: list[float] = field(default_factory=list)
    """The same of the hand-written loop."""
    engine_wall: list[float] = field(default_factory=list)
    data_tokens_per_second: float = 0.0
    save_seconds: float = 0.0
    load_seconds: float = 0.0
    checkpoint_bytes: int = 0
    matmul_flops: float = 0.0
    """FLOP/s of a large matrix product here, in the run's precision."""
    peak_flops: float = 0.0
    """FLOP/s by the device's data sheet; 0 where it is not known."""

    @property
    def speed(self) -> float:
        """Tokens per second of `clock` of the engine, relative to the hand-written loop; the median of all turns."""
        pairs = zip(self.by_hand, self.engine, strict=True)
        return statistics.median(hand / engine for hand, engine in pairs)

    @property
    def tokens_per_second(self) -> float:
        """Of the engine, by the wall."""
        return TURN * self.tokens_per_step / statistics.median(self.engine_wall)

    @property
    def share_of_matmul(self) -> float | None:
        """FLOP/s of training, as a share of what a matrix product reaches here."""
        return self._share(self.matmul_flops)

    @property
    def mfu(self) -> float | None:
        """FLOP/s of training, as a share of the device's peak."""
        return self._share(self.peak_flops)

    def _share(self, flops: float) -> float | None:
        if self.flops_per_token is None or not flops:
            return None
        return self.tokens_per_second * self.flops_per_token / flops

    def as_json(self) -> dict[str, Any]:
        """Every figure by name."""
        return {
            "tokens_per_second": self.tokens_per_second,
            "loop_speed": self.speed,
            "clock": self.clock,
            "parameters": self.parameters,
            "flops_per_token": self.flops_per_token,
            "matmul_flops": self.matmul_flops,
            "share_of_matmul": self.share_of_matmul,
            "mfu": self.mfu,
            "data_tokens_per_second": self.data_tokens_per_second,
            "save_seconds": self.save_seconds,
            "load_seconds": self.load_seconds,
            "checkpoint_bytes": self.checkpoint_bytes,
        }


class Probe(Plugin):
    """Measures a run from inside, and takes turns with it; `forge bench` enables it."""

    api = (1, 0)
    result: Measured
    last: int  # the step after which the run ends
    product_size = 0  # rows, see `matmul_speed`

    @hookimpl
    def on_start(self, job: Job, model: Model, optimizer: torch.optim.Optimizer) -> None:
        from forge_train_kit.peaks import device_peak

        train = job.config.train
        self._job, self._model = job, model
        self._now = clock_of(job.device)
        self.result = Measured(
            steps=self.last,
            clock="CPU" if job.device.type == "cpu" else "wall",
            tokens_per_step=train.tokens_per_step,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            flops_per_token=(flops := model.flops_per_token(train.sequence)),
        )
        self._flops = flops
        loader = job.hooks.build_data("train")
        self.result.data_tokens_per_second = data_speed(loader, train.micro_batch * train.sequence)
        self.result.matmul_flops = matmul_speed(job, size=self.product_size)
        self.result.peak_flops = device_peak(job)
        self._by_hand = ByHand(job, model, optimizer, loader)
        self._began, self._wall = self._now(), time.perf_counter()

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        if step.step == self.last:
            self._job.control.stop("measured")
        if step.step % TURN:
            return
        self._wait()
        counts = step.step > WARM_UP * TURN
        if counts:
            self.result.engine.append(self._now() - self._began)
            self.result.engine_wall.append(time.perf_counter() - self._wall)
        began = self._now()
        for _ in range(TURN):
            self._by_hand.step()
        self._wait()
        if counts:
            self.result.by_hand.append(self._now() - began)
        if self._flops is not None:
            self.result.flops_per_token = self._flops + self._by_hand.of_items / self._by_hand.tokens
        self._began, self._wall = self._now(), time.perf_counter()

    @hookimpl
    def on_checkpoint(self, event: CheckpointEvent) -> None:
        if event.kind == "saving":
            self._wall = time.perf_counter()
        elif event.kind == "saved":
            from forge_train.checkpoint import checkpoint

            self.result.save_seconds = time.perf_counter() - self._wall
            weights = {f"model.{name}": tensor for name, tensor in self._model.state_dict().items()}
            began = time.perf_counter()
            checkpoint.load(event.path, weights, self._job.dist)
            self.result.load_seconds = time.perf_counter() - began
            self.result.checkpoint_bytes = sum(file.stat().st_size for file in event.path.iterdir())

    def _wait(self) -> None:
        if self._job.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._job.device)


def measure(request: Request, *, turns: int = 8, probe: str = "") -> Measured:
    """Train as asked, for a few steps in a folder that is removed again, and measure.

    Args:
        request: model, data and plugins; how long, evaluations and checkpoints are chosen here.
        turns: of each loop, beside those that warm up.
        probe: `module:Probe`, a subclass of `Probe` that looks at more.

    Raises:
        ForgeError: as `forge train` does.
    """
    from forge_train.engine import train

    own = (f"train.steps={LONG}", "train.evaluate_every=0", "checkpoint.every=0", "log.every=10")
    plugins = (*request.plugins, probe or f"{__name__}:Probe")
    setup = resolve(dataclasses.replace(request, plugins=plugins, set=(*request.set, *own, *FRESH)))
    for name, enabled in setup.hooks.enabled.items():
        if DISPLAY.of(enabled.cls):
            setup.hooks.mute(name)
    found = setup.hooks.plugins["probe"]
    assert isinstance(found, Probe)
    found.last = (turns + WARM_UP) * TURN
    with tempfile.TemporaryDirectory(prefix="forge-bench-") as folder:
        train(setup, run_dir=Path(folder), resume="never")
    return found.result


def data_speed(loader: Loader, tokens: int, *, seconds: float = 0.5) -> float:
    """Tokens per second of a loader, by the wall, after a first batch.

    Args:
        loader: any.
        tokens: in one of its micro-batches.
        seconds: how long to look.
    """
    next(loader)
    count, began = 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds:
        next(loader)
        count += 1
    return count * tokens / spent


def clock_of(device: torch.device) -> Callable[[], float]:
    """The clock that loops are compared by: CPU time on a CPU, the wall's where an accelerator works beside it."""
    return time.process_time if device.type == "cpu" else time.perf_counter


def matmul_speed(job: Job, *, size: int = 0, seconds: float = 0.5) -> float:
    """FLOP/s of a product of two square matrices in the run's precision.

    Args:
        job: whose device multiplies.
        size: rows; 0 takes as many as keep the device busy.
        seconds: how long to look.
    """
    import torch

    size = size or (1024 if job.device.type == "cpu" else 8192)  # an H100 computes 1024³ in the time of its launch
    one = torch.randn(size, size, device=job.device).to(job.precision.compute)
    wait: Callable[[], None] = torch.cuda.synchronize if job.device.type == "cuda" else (lambda: None)
    one @ one
    wait()
    count, began = 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds:
        one @ one
        wait()
        count += 1
    return count * 2 * size**3 / spent


def cpu_seconds(command: Sequence[str], times: int = 5) -> float:
    """The least CPU time that a process took, over several runs. Modules are compiled once, as pip compiles them."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    found = []
    for _ in range(times):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)  # os.times() counts in hundredths of a second
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(found)


def start_up(commands: Sequence[Sequence[str]], times: int = 5) -> list[float]:
    """CPU time of each command relative to `python -c pass`; all take turns."""
    taking_turns = ([sys.executable, "-c", "pass"], *commands)
    rounds = [[cpu_seconds(command, 1) for command in taking_turns] for _ in range(times + 1)][1:]  # the first compiles
    least = [min(column) for column in zip(*rounds, strict=True)]
    return [one / least[0] for one in least[1:]]
