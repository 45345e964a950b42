"""Plugins that parallelise the toys in the plainest way, right and wrong. Enable them as `layouts:Replicas`."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import nn

from forge_train import Applied, ConfigError, Ge, Phase, Plugin, Transform, hookimpl, section
from forge_train_kit.model import Linear


class Replicas(Plugin):
    """Whole copies on every rank, whose gradients are averaged after the last backward pass of a step."""

    api = (1, 0)
    factor = 1.0

    @hookimpl
    def parallelize(self, job: Any) -> Transform | None:
        if job.dist.world == 1:
            return None

        def apply(part: nn.Module) -> Applied:
            names = [name for name, _ in part.named_parameters()]
            return Applied(part, tuple(names), after_backward=lambda: self.average(job, part))

        return Transform(Phase.SHARD, "replicas", apply, covers=("dp_shard", "dp_replicate"))

    def average(self, job: Any, part: nn.Module) -> None:
        for name, parameter in part.named_parameters():
            if parameter.grad is not None and not self.left_out(name):
                job.dist.all_reduce(parameter.grad, axis="data")
                parameter.grad.mul_(self.factor / job.dist.layout.grad_average_size)

    def left_out(self, name: str) -> bool:
        return False


class Trouble(Plugin):
    """Something happens on one rank, in the first attempt, before the optimizer's step of a given number."""

    api = (1, 0)

    @section
    class Config:
        what: str = "kill"
        at: Annotated[int, Ge(0)] = 3
        rank: Annotated[int, Ge(0)] = 1

    @hookimpl
    def on_gradients(self, update: Any) -> None:
        here = int(os.environ.get("RANK", "-1")) == self.config.rank and not int(
            os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        )
        if not here or update.step != self.config.at:
            return
        if self.config.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.config.what == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif self.config.what == "crash in C":
            c = ctypes.CDLL(None)
            c.pthread_create(ctypes.byref(ctypes.c_ulong()), None, c.abort, None)
            time.sleep(60)
        elif self.config.what == "hang":
            Path("hangs").touch()
            time.sleep(6000)
        elif self.config.what == "raise":
            raise ValueError("something of this rank's own")


class Slow(Plugin):
    """Steps that take long enough to be interrupted."""

    api = (1, 0)

    @section
    class Config:
        seconds: Annotated[float, Ge(0)] = 0.1

    @hookimpl
    def on_step(self, step: Any) -> None:
        time.sleep(self.config.seconds)


# -- wrong ones, for `forge verify` to find --------------------------------------------------------------------------


class Doubled(Replicas):
    """An averaging factor that is wrong everywhere."""

    factor = 2.0


class DoubledUps(Replicas):
    """An averaging factor that is wrong for some parameters."""

    def average(self, job: Any, part: nn.Module) -> None:
        super().average(job, part)
        for name, parameter in part.named_parameters():
            if ".up." in name:
                parameter.grad.mul_(2)


class NormsLeft(Replicas):
    """Norms whose gradients stay what this rank's data gave."""

    def left_out(self, name: str) -> bool:
        return "norm" in name


class Unclipped(Replicas):
    """Gradients that are right, and an optimizer step that differs from rank to rank."""

    @hookimpl
    def on_step(self, step: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.add_(1e-3 * int(os.environ.get("RANK", "0")))

    @hookimpl
    def on_start(self, job: Any, model: Any, optimizer: Any) -> None:
        self.parameters = list(model.parameters())


class Peers(Plugin):
    """Stands in for tensor parallelism: ranks with the same data-parallel rank all do the same."""

    api = (1, 0)

    @hookimpl
    def parallelize(self, job: Any) -> Transform:
        def apply(part: nn.Module) -> Applied:
            return Applied(part, ("layers",))

        return Transform(Phase.TENSOR, "peers", apply, covers=("tp",))


class RankData(Plugin):
    """Data by rank instead of by data-parallel rank."""

    api = (1, 0)

    @hookimpl
    def build_data(self, job: Any, split: str) -> Any:
        from toys import ToyLoader

        class Loader(ToyLoader):
            def __next__(self) -> Any:
                self.offset = 1000 * self.job.dist.rank
                return super().__next__()

        return Loader(job, True, 0)


class Columns(Plugin):
    """Claims linears by name and type, as tensor parallelism does."""

    api = (1, 0)

    @section
    class Config:
        plan: tuple[str, ...] = ("up", "down")

    @hookimpl
    def parallelize(self, job: Any) -> Transform:
        def apply(part: nn.Module) -> Applied:
            found = {n: m for n, m in part.named_modules() if type(m) is Linear}
            for entry in self.config.plan:
                if found and not any(name.endswith(f".{entry}") for name in found):
                    raise ConfigError(f"Plugin 'columns': the plan's entry {entry!r} matches nothing.")
            return Applied(part, tuple(found))

        return Transform(Phase.TENSOR, "columns", apply, covers=("tp",))


class Replaced(Linear):
    """A linear of another type."""


class TooEarly(Plugin):
    """Replaces linears, as FP8 does, but before tensor parallelism instead of after it."""

    api = (1, 0)

    @hookimpl
    def parallelize(self, job: Any) -> Transform:
        def apply(part: nn.Module) -> Applied:
            names = [name for name, module in part.named_modules() if type(module) is Linear]
            for name in names:
                part.get_submodule(name).__class__ = Replaced
            return Applied(part, tuple(names))

        return Transform(Phase.PIPELINE, "too_early", apply)
