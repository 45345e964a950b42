"""A plugin whose run sleeps: between micro-batches, after steps, and while checkpoints are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from forge_train import Applied, Job, Model, Phase, Plugin, StepResult, Transform, hookimpl, section
from forge_train_kit.sleep import Asleep, asleep


class Sleeper(Plugin):
    """Sleeps whenever it can, and notes addresses and objects before and after."""

    api = (1, 0)

    @section
    class Config:
        folder: str = "."

    config: Any

    @hookimpl
    def parallelize(self, job: Job) -> Transform:
        def apply(part: nn.Module) -> Applied:
            names = tuple(name for name, _ in part.named_parameters())
            return Applied(part, names, on_micro_batch=lambda _: self.nap())

        return Transform(Phase.COMPILE, "sleeper", apply)

    @hookimpl
    def on_start(self, job: Job, model: Model, optimizer: Any) -> None:
        self.all = job, model, optimizer
        self.bytes: list[int] = []

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        self.nap()

    def nap(self) -> None:
        before = self.places()
        with asleep(*self.all, folder=Path(self.config.folder)) as sleeping:
            self.bytes.append(sleeping.bytes)
            sleeping.wake("optimizer")
            sleeping.wake("optimizer")
            assert "optimizer" not in sleeping.tags
        assert sleeping == Asleep() or not sleeping.tags
        assert self.places() == before

    def places(self) -> list[Any]:
        """Objects and addresses."""
        _, model, optimizer = self.all
        local = [getattr(one, "_local_tensor", one) for one in model.parameters()]
        keys = [id(one) for one in optimizer.state]
        return [*((id(one), one.data_ptr()) for one in local), *keys]
