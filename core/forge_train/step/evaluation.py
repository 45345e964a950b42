"""The evaluations of a run: the loss on held-out data, and those that plugins name."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..base.errors import ConfigError, PluginError
from ..contract.events import Evaluation
from ..contract.protocols import Loader
from .aggregate import Metrics, split
from .forward import Forward, close


class Evaluations:
    """Every evaluation, each on the same data every time.

    Args:
        forward: the model at work.
        held_out: the data of the held-out loss, where each evaluation begins.
    """

    def __init__(self, forward: Forward, held_out: Loader) -> None:
        self._forward, hooks = forward, forward.job.hooks
        self._held_out = _Data.of(held_out)
        named = hooks.evaluators()
        for (first, one), (second, other) in itertools.combinations(named, 2):
            if one.name == other.name:
                raise ConfigError(f"Two evaluations are named {one.name!r}: {first} and {second}.")
        self._others = [
            (one, whose, _Data.of(_made(one.data, whose)), Metrics(forward.job, one.metrics)) for whose, one in named
        ]

    def run(self, step: int, batches: int | None = None) -> Evaluation:
        """Run the evaluations and return their results; the caller notifies plugins.

        Args:
            step: the run's current step.
            batches: global batches of each evaluation; by default, as the configuration and its plugin say.
        """
        usual = self._forward.job.config.train.evaluate_batches
        with self._forward.metrics.apart():
            held_out = self._held_out.from_start()
            loss, tokens = self._forward.mean_loss(held_out, (batches or usual) * self._forward.accumulation)
            found = self._forward.metrics.take()
            for evaluator, whose, data, metrics in self._others:
                count = (batches or evaluator.batches or usual) * self._forward.accumulation
                self._forward.measure(evaluator, data.from_start(), count, whose)
                found |= {f"{evaluator.name}.{name}": value for name, value in metrics.take().items()}
        return Evaluation(step, loss, tokens, *split(found))

    def close(self) -> None:
        """No evaluation follows."""
        for data in (self._held_out, *(data for _, _, data, _ in self._others)):
            close(data.loader)


@dataclass(frozen=True)
class _Data:
    loader: Loader
    start: dict[str, Any]

    @classmethod
    def of(cls, loader: Loader) -> _Data:
        return cls(loader, loader.state_dict())

    def from_start(self) -> Loader:
        self.loader.load_state_dict(self.start)
        return self.loader


def _made(make: Callable[[], Loader], whose: str) -> Loader:
    loader = make()
    if not isinstance(loader, Loader):
        raise PluginError(f"{whose}: `data` must give a Loader, found {type(loader).__name__}.")
    return loader
