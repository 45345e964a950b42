"""What metrics and trackers cost a step, on one thread.

Prints one line of JSON: milliseconds of CPU time a step, the best of several rounds each.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from forge_train import Metric, Plugin, hookimpl
from forge_train.step.aggregate import Metrics
from forge_train_kit import metrics
from forge_train_kit.tracking import Tracker
from forge_train_plugins.observers.csv import CSV
from forge_train_plugins.observers.tensorboard import TensorBoard
from forge_train_tools.testing import run_forge

WARM_UP, STEPS, ROUNDS = 20, 100, 3
SETTINGS = {"log.every": 10, "checkpoint.every": 0}


class Observes(Plugin):
    """Every kind of metric, with 2,048 values in each step."""

    api = (1, 0)

    @hookimpl
    def metrics(self, job: Any) -> dict[str, Metric]:
        self.values, self.labels = torch.rand(2048), torch.arange(2048) % 2
        self.mean, self.sum, self.least, self.most = metrics.Mean(), metrics.Sum(), metrics.Min(), metrics.Max()
        self.ratio, self.perplexity = metrics.Ratio(), metrics.Perplexity()
        self.quantile, self.histogram = metrics.Quantile(), metrics.Histogram(0, 1)
        self.accuracy, self.auroc, self.matrix = metrics.Accuracy(), metrics.AUROC(), metrics.ConfusionMatrix(2)
        return {name: one for name, one in vars(self).items() if isinstance(one, Metric)}

    @hookimpl
    def on_step(self, step: Any) -> None:
        self.usual(step)
        self.others(step)

    def usual(self, step: Any) -> None:
        """What a run may have."""
        self.perplexity.update(step.loss, 1)
        self.accuracy.update(self.values.view(-1, 2), self.labels[:1024])
        for one in (self.mean, self.most):
            one.update(self.values)

    def others(self, step: Any) -> None:
        """All the rest."""
        for one in (self.sum, self.least, self.quantile, self.histogram):
            one.update(self.values)
        self.ratio.update(step.loss, step.grad_norm)
        self.auroc.update(self.values, self.labels)
        self.matrix.update(self.labels, self.labels)


class Blocks(Tracker):
    """Waits for a server that does not answer."""

    api = (1, 0)
    capacity = 10
    patience = 0.1

    def open(self, run: Any, config: Mapping[str, Any]) -> None: ...

    def log(self, *record: Any) -> None:
        threading.Event().wait(60)


SPENT: dict[str, list[float]] = {}
"""What → CPU seconds of the thread that does it, each time since the warm-up."""


def timed(what: str, function: Any) -> Any:
    def call(*arguments: Any, **named: Any) -> Any:
        began = time.thread_time()
        try:
            return function(*arguments, **named)
        finally:
            SPENT.setdefault(what, []).append(time.thread_time() - began)

    return call


class Begins(Plugin):
    """Forgets what was spent during the warm-up."""

    api = (1, 0)

    @hookimpl
    def on_step(self, step: Any) -> None:
        if step.step == WARM_UP:
            SPENT.clear()


def run(*plugins: Any) -> dict[str, float]:
    """Milliseconds of a step."""
    with tempfile.TemporaryDirectory() as folder:
        run_forge([Begins, *plugins], SETTINGS, steps=WARM_UP + STEPS, folder=Path(folder))
    return {what: 1e3 * statistics.median(each) * len(each) / STEPS for what, each in SPENT.items()}


def main() -> None:
    torch.set_num_threads(1)
    Observes.usual = timed("usual", Observes.usual)  # type: ignore[method-assign]
    Observes.others = timed("others", Observes.others)  # type: ignore[method-assign]
    Metrics.take = timed("adding up", Metrics.take)  # type: ignore[method-assign]
    Tracker._send = timed("handing over", Tracker._send)  # type: ignore[method-assign]
    for cls in (CSV, TensorBoard):
        cls.log = timed("threads", cls.log)  # type: ignore[method-assign]
    rounds = [run(Observes, "csv", "tensorboard") for _ in range(ROUNDS)]
    blocked = [run(Blocks)["handing over"] for _ in range(ROUNDS)]
    print(json.dumps({**{what: min(one[what] for one in rounds) for what in rounds[0]}, "blocked": min(blocked)}))


if __name__ == "__main__":
    main()
