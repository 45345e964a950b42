"""The task of language modelling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge_train import Batch, Plugin, Task, hookimpl
from forge_train_kit.hookspecs import loss
from forge_train_kit.losses import LossFunction, batch_loss, batch_weight

if TYPE_CHECKING:
    from torch import Tensor, nn

    from forge_train import Job


class NextToken(Plugin):
    """Next-token prediction: each position is trained on the token that follows it."""

    api = (1, 0)
    requires = ("loss",)
    facts = {"plan.per_unit": True, "task.weighs_labels": True}

    @hookimpl
    def task(self, job: Job) -> Task:
        return NextTokenTask(loss(job))


@dataclass(frozen=True)
class NextTokenTask:
    """Calls the `loss` slot; every unmasked label counts once, or as much as its weight says."""

    loss_function: LossFunction

    def weight(self, batch: Batch) -> int | float:
        return batch_weight(batch)

    def loss(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        return batch_loss(self.loss_function, hidden, part.get_submodule("head"), batch)

    def outputs(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        logits: Tensor = part.get_submodule("head")(hidden)
        return logits
