"""The head, the task and the metric of the `classify` and `token_classify` plugins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from forge_train import MASKED, Batch, Job
from forge_train_kit.losses import LossFunction, batch_loss
from forge_train_kit.metrics import Accuracy, ConfusionMatrix
from forge_train_kit.model import Linear, full_tensor


class ClassHead(nn.Module):
    """Hidden states `[…, dim]` → logits `[…, classes]`.

    Args:
        dim: features of the hidden states.
        classes: their names, for an export.
        bias: whether the linear layer has a bias.
        std: standard deviation of its initial weights.
    """

    def __init__(self, dim: int, classes: Sequence[str], *, bias: bool, std: float) -> None:
        super().__init__()
        self.classes = tuple(classes)
        self.score = Linear(dim, len(classes), bias=bias, std=std)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.score(hidden)
        return logits


class MacroF1(ConfusionMatrix):
    """F1, averaged over the classes that occur."""

    def value(self, sums: Tensor, maxima: Tensor) -> float:  # type: ignore[override]
        return super().value(sums, maxima)["f1"]


@dataclass(frozen=True)
class Observed:
    """The metrics, once they have been requested."""

    accuracy: Accuracy
    macro_f1: MacroF1

    @classmethod
    def of(cls, classes: int) -> Observed:
        return cls(Accuracy(), MacroF1(classes))

    def update(self, logits: Tensor, labels: Tensor) -> None:
        self.accuracy.update(logits, labels)
        self.macro_f1.update(logits.argmax(-1), labels)


@dataclass(frozen=True)
class Classification:
    """Every unmasked label `[batch, sequence]` is the class at its position: of a text at its last token, or of a
    token. Labels lie along the sequence, so they can be split along with it."""

    loss_function: LossFunction
    observed: Callable[[], Observed | None]

    def weight(self, batch: Batch) -> int:
        return int((batch.labels != MASKED).sum())

    def loss(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        head = part.get_submodule("head")
        if (observed := self.observed()) is not None:
            with torch.no_grad():
                observed.update(full_tensor(head(hidden)), batch.labels)
        return batch_loss(self.loss_function, hidden, head, batch)

    def outputs(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        logits: Tensor = part.get_submodule("head")(hidden)
        return logits


def class_of_record(
    job: Job, classes: Sequence[str], part: nn.Module, hidden: Tensor, batch: Batch
) -> dict[str, list[Any]]:
    """The likeliest class of each record, and the probability of every one."""
    from forge_train_tools.inference.outputs import at_last, plain

    logits = at_last(job, part.get_submodule("head")(hidden), batch)
    shares = plain(logits.double().softmax(-1))
    return {
        "class": [classes[best] for best in logits.argmax(-1).tolist()],
        "probabilities": [dict(zip(classes, row, strict=True)) for row in shares],
    }
