"""Heads, tasks and losses of a third party, which classify sequences and predict a number for each: nothing of forge's
own fills these slots, or gives the data. As `heads:ClassHead`."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import toys
from forge_train import Batch, Job, Plugin, hookimpl
from forge_train_kit import hookspecs
from forge_train_kit.heads import HeadSpec
from forge_train_kit.model import Linear

CLASSES = 5


class Last(nn.Module):
    """Outputs from a sequence's last hidden state: `[batch, sequence, dim]` → `[batch, outputs]`."""

    def __init__(self, dim: int, outputs: int) -> None:
        super().__init__()
        self.score = Linear(dim, outputs, bias=True, std=0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        outputs: Tensor = self.score(hidden[:, -1])
        return outputs


class ClassHead(Plugin):
    """Logits over classes, one row for each sequence."""

    api = (1, 0)
    gives = {"head": "class_logits"}

    @hookimpl
    def head(self, spec: HeadSpec, job: Job) -> Any:
        return Last(spec.dim, CLASSES)


class ClassTask(Plugin):
    """Classifies sequences."""

    api = (1, 0)
    requires = ("loss",)
    gives = {"task": "class_labels"}
    takes = {"head": ("class_logits",)}

    @hookimpl
    def task(self, job: Job) -> Any:
        return Sequences(hookspecs.loss(job))


class ClassLoss(Plugin):
    """Cross-entropy of classes."""

    api = (1, 0)
    takes = {"head": ("class_logits",), "task": ("class_labels",)}

    @hookimpl
    def loss(self, job: Job) -> Any:
        def summed(hidden: Tensor, head: nn.Module, labels: Tensor) -> Tensor:
            return F.cross_entropy(head(hidden).float(), labels, reduction="sum")

        return summed


class Regression(Plugin):
    """Predicts each sequence's mean token: head, task and loss in one, with a head of its own in no plan."""

    api = (1, 0)
    gives = {"head": "numbers", "task": "numbers"}
    takes = {"head": ("numbers",)}

    @hookimpl
    def head(self, spec: HeadSpec, job: Job) -> Any:
        return Last(spec.dim, 1)

    @hookimpl
    def task(self, job: Job) -> Any:
        def squared(hidden: Tensor, head: nn.Module, labels: Tensor) -> Tensor:
            return (head(hidden).float().squeeze(-1) - labels / CLASSES).square().sum()

        return Sequences(squared)


class Sequences:
    """Every sequence counts once."""

    def __init__(self, loss: Any) -> None:
        self.loss_function = loss

    def weight(self, batch: Batch) -> int:
        return len(batch.labels)

    def loss(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        loss: Tensor = self.loss_function(hidden, part.get_submodule("head"), batch.labels)
        return loss

    def outputs(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        outputs: Tensor = part.get_submodule("head")(hidden)
        return outputs


class Counting(Plugin):
    """Sequences that count round in twelve tokens, each class in its own."""

    api = (1, 0)

    @hookimpl
    def build_data(self, job: Job, split: Literal["train", "validation"]) -> Any:
        return CountingLoader(job)


class CountingLoader(toys.PlacedLoader):
    def batch(self, places: Tensor) -> Batch:
        classes = places * 7 % CLASSES
        columns = torch.arange(self.job.config.train.sequence)
        return Batch(12 * classes[:, None] + (places[:, None] + columns) % 12, classes)
