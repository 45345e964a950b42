"""An evaluator of a third party, with data of its own. As `accuracy:Accuracy`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import toys
from forge_train import MASKED, Batch, Job, Model, Plugin, StepResult, hookimpl
from forge_train.plugin import hookspecs
from forge_train_kit.contract import Evaluator
from forge_train_kit.model import full_tensor
from forge_train_tools.offline.evaluate import worker
from forge_train_tools.testing import run_forge


class Accuracy(Plugin):
    """How often the next token is among the 64 likeliest in texts that count up, and how sure the model is."""

    api = (1, 0)

    @hookimpl
    def evaluators(self, job: Job) -> Evaluator:
        from forge_train_kit.metrics import Accuracy, Mean

        task = hookspecs.task(job)
        accuracy, confidence = Accuracy(top=64), Mean()

        def measure(part: nn.Module, hidden: Tensor, batch: Batch) -> None:
            logits = full_tensor(task.outputs(part, hidden, batch)).float()
            accuracy.update(logits, batch.labels)
            confidence.update(logits.softmax(-1).amax(-1), weights=batch.labels != MASKED)

        metrics = {"accuracy": accuracy, "confidence": confidence}
        return Evaluator("counting", lambda: CountingUp(job), measure, metrics, batches=3)


class CountingUp(toys.PlacedLoader):
    """Sequence n is the bytes n, n + 1, …; of every fifth label it says nothing."""

    def batch(self, places: Tensor) -> Batch:
        tokens = (places[:, None] + torch.arange(self.job.config.train.sequence + 1)) % 256
        labels = tokens[:, 1:].clone()
        labels[labels % 5 == 0] = MASKED
        return Batch(tokens[:, :-1], labels)


class Seldom(Plugin):
    """An evaluation every third step, whose loader measures by itself: it counts the model's parameters."""

    api = (1, 0)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._step = 0

    @hookimpl
    def evaluators(self, job: Job) -> Evaluator:
        from forge_train_kit.metrics import Mean

        counted = Mean()

        class Looking(CountingUp):
            def on_model(self, model: Model) -> None:
                assert not any(part.training for part in model.parts)
                counted.update(torch.tensor([float(sum(one.numel() for _, one in model.named_parameters()))]))

            def __next__(self) -> Batch:
                raise AssertionError("no batch is to be taken")

        metrics = {"parameters": counted}
        due = lambda: self._step % 3 == 0  # noqa: E731
        return Evaluator("seldom", lambda: Looking(job), lambda *_: None, metrics, batches=-1, due=due)

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        self._step = step.step


class Unmeasured(Accuracy):
    """Gives a function in the place of a metric."""

    @hookimpl
    def evaluators(self, job: Job) -> Evaluator:
        made = super().evaluators(job)
        return Evaluator("counting", made.data, made.measure, {"right": len})  # type: ignore[dict-item]


class Silent(Plugin):
    """Gives the evaluator that another one gives too."""

    api = (1, 0)

    @hookimpl
    def evaluators(self, job: Job) -> list[Evaluator]:
        return [Accuracy(None).evaluators(job)]


def train(folder: str, plugins: list[str], config: dict[str, Any], name: str = "") -> dict[str, Any]:
    """Train and evaluate; what was found each time."""
    run = run_forge(plugins, config, steps=4, name=name, folder=Path(folder))
    found = [event for event in run.events if event["event"] == "evaluation"]
    return {"run": str(run.run), "found": [{key: one[key] for key in ("loss", "tokens", "metrics")} for one in found]}


def evaluate(path: str) -> dict[str, Any]:
    """`forge eval PATH` on each rank."""
    found: dict[str, Any] = worker(path, {"plugins": [], "set": []})["evaluated"]
    return found
