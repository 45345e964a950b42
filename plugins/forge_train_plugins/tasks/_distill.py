"""The task of the `distill` plugin."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from forge_train import MASKED, Batch, ConfigError, Model
from forge_train_kit.losses import LossFunction
from forge_train_kit.model import full_tensor, sum_in_chunks


@dataclass(frozen=True)
class Distillation:
    """`(1 − share) · loss + share · T² · Σ divergence` over unmasked labels, both models at temperature T."""

    loss_function: LossFunction
    models: Mapping[str, Model]
    """Adds the teacher, except in a job that computes no loss."""
    share: float
    temperature: float
    chunk: int
    divergence: Literal["forward", "reverse", "jensen_shannon"] = "forward"
    observed: Callable[[], Any] = lambda: None
    """The metric of the divergence; None in a job without metrics."""

    def weight(self, batch: Batch) -> int:
        return int((batch.labels != MASKED).sum())

    def loss(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        head = part.get_submodule("head")
        if not part.training:
            return self.loss_function(hidden, head, batch.labels)
        teacher = self.models["teacher"]
        with torch.no_grad():
            taught = teacher(batch.inputs, **batch.model_inputs())
        loss = partial(self._divergence, head, teacher.parts[-1].get_submodule("head"))
        soft = sum_in_chunks(loss, head, self.chunk, hidden, taught, batch.labels)
        if (metric := self.observed()) is not None:
            metric.update(soft.detach() / self.temperature**2, (batch.labels != MASKED).sum())
        if self.share == 1:
            return soft
        return self.share * soft + (1 - self.share) * self.loss_function(hidden, head, batch.labels)

    def outputs(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        logits: Tensor = part.get_submodule("head")(hidden)
        return logits

    def _divergence(
        self, head: nn.Module, teaching: nn.Module, hidden: Tensor, taught: Tensor, labels: Tensor
    ) -> Tensor:
        """The divergence of a chunk, whose logits may be split over ranks."""
        with torch.no_grad():
            theirs = teaching(taught).float() / self.temperature
            teacher = theirs - theirs.logsumexp(-1, keepdim=True)
        mine = head(hidden).float() / self.temperature
        if mine.shape != theirs.shape:
            raise ConfigError(
                f"distill.teacher: the teacher's vocabulary has {theirs.shape[-1]:,} tokens, but the student's has "
                f"{mine.shape[-1]:,}; they must be equal."
            )
        student = mine - mine.logsumexp(-1, keepdim=True)
        if self.divergence == "forward":
            each = kl(teacher, student)
        elif self.divergence == "reverse":
            each = kl(student, teacher)
        else:
            middle = torch.logaddexp(teacher, student) - math.log(2)
            each = (kl(teacher, middle) + kl(student, middle)) / 2
        return self.temperature**2 * (each * (labels != MASKED)).sum()


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p ‖ q) of log-probabilities, over the last dimension."""
    return full_tensor((log_p.exp() * (log_p - log_q)).sum(-1))
