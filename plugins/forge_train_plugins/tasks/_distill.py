"""The task of the `distill` plugin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from forge_train import MASKED, Batch, ConfigError, Model
from forge_train_kit.losses import LossFunction
from forge_train_kit.model import full_tensor, sum_in_chunks


@dataclass(frozen=True)
class Distillation:
    """`(1 − share) · loss + share · T² · Σ KL(teacher ‖ student)` over unmasked labels, both at temperature T."""

    loss_function: LossFunction
    models: Mapping[str, Model]
    """Adds the teacher, except in a job that computes no loss."""
    share: float
    temperature: float
    chunk: int

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
        if self.share == 1:
            return soft
        return self.share * soft + (1 - self.share) * self.loss_function(hidden, head, batch.labels)

    def outputs(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        logits: Tensor = part.get_submodule("head")(hidden)
        return logits

    def _divergence(
        self, head: nn.Module, teaching: nn.Module, hidden: Tensor, taught: Tensor, labels: Tensor
    ) -> Tensor:
        """The divergence of a chunk: `Σ p (x − y) − log Σ exp x + log Σ exp y`, with the teacher's logits x, their
        softmax p and the student's logits y."""
        with torch.no_grad():
            theirs = teaching(taught).float() / self.temperature
            partition = theirs.logsumexp(-1, keepdim=True)
            targets = (theirs - partition).exp()
        mine = head(hidden).float() / self.temperature
        if mine.shape != theirs.shape:
            raise ConfigError(
                f"distill.teacher: the teacher's vocabulary has {theirs.shape[-1]:,} tokens, but the student's has "
                f"{mine.shape[-1]:,}; they must be equal."
            )
        apart = full_tensor((targets * (theirs - mine)).sum(-1)) - full_tensor(partition).squeeze(-1)
        divergence = apart + full_tensor(mine.logsumexp(-1))
        return self.temperature**2 * (divergence * (labels != MASKED)).sum()
