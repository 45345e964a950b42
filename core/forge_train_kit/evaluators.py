"""Evaluations that plugins name (`evaluators`), each with data and metrics of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from forge_train.base.errors import ConfigError, PluginError
from forge_train.contract.batch import Batch
from forge_train.contract.events import Value
from forge_train.contract.protocols import Loader
from forge_train.plugin import hookspecs
from forge_train.step import forward as kernel
from forge_train.step.aggregate import Metrics
from forge_train.step.forward import Forward, HeldOut, close

from .contract import Evaluator
from .hookspecs import evaluators


class Evaluations(kernel.Evaluations):
    """Every evaluation, each on the same data every time."""

    def __init__(self, forward: Forward, held_out: Loader) -> None:
        super().__init__(forward, held_out)
        job = forward.job
        named: list[tuple[str, Evaluator]] = []
        for name, answer in evaluators(job):
            some: Any = answer
            named += [
                (job.hooks.whose("evaluators", name), one) for one in ([some] if isinstance(some, Evaluator) else some)
            ]
        for (first, one), (second, other) in itertools.combinations(named, 2):
            if one.name == other.name:
                raise ConfigError(f"Two evaluations are named {one.name!r}: {first} and {second}.")
        self._others = [
            (one, whose, HeldOut.of(_made(one.data, whose)), Metrics(job, one.metrics)) for whose, one in named
        ]

    def others(self, batches: int | None) -> dict[str, Value]:
        usual, found = self._forward.job.config.train.evaluate_batches, dict[str, Value]()
        for one, whose, data, metrics in (each for each in self._others if each[0].due()):
            count = (min(one.batches, 0) or batches or one.batches or usual) * self._forward.accumulation
            measure(self._forward, one, data.from_start(), count, whose)
            found |= {f"{one.name}.{name}": value for name, value in metrics.take().items()}
        return found

    def close(self) -> None:
        super().close()
        for _, _, data, _ in self._others:
            close(data.loader)


def measure(forward: Forward, evaluator: Evaluator, data: Loader, count: int, whose: str) -> None:
    """Have an evaluator see some micro-batches of each rank."""
    task = _Measuring(evaluator)
    executor = hookspecs.executor(forward.model, task, forward.job)
    forward.show_model(data)
    forward.model.train(False)
    for size in forward.global_batches(count):
        for batch in forward.on_device(forward.take_batches(data, size, whose)):
            forward.evaluated(executor, batch)
    forward.model.free_gathered()
    forward.model.train()


@dataclass
class _Measuring:
    """A task that measures in the place of a loss: executors run it as they run any."""

    evaluator: Evaluator

    def weight(self, batch: Batch) -> int:
        return 0

    def loss(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        self.evaluator.measure(part, hidden, batch)
        return torch.zeros((), device=hidden.device)

    def outputs(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        return hidden


def _made(make: Callable[[], Loader], whose: str) -> Loader:
    loader = make()
    if not isinstance(loader, Loader):
        raise PluginError(f"{whose}: `data` must give a Loader, found {type(loader).__name__}.")
    return loader
