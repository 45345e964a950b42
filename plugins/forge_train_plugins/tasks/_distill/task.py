"""The task of the `distill` plugin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from forge_train import MASKED, Batch, ConfigError, Model
from forge_train_kit.losses import LossFunction
from forge_train_kit.model import full_tensor, sum_in_chunks

from ..distill import TEACHER
from .divergence import Kind, divergence, likeliest, log_probabilities, top_log_probabilities
from .hidden import HiddenStates
from .stored import TOKENS_OF, VALUES_OF, StoredLogits


@dataclass(frozen=True)
class Distillation:
    """`(1 − share) · loss + share · T² · Σ divergence` over unmasked labels, both models at temperature T; and
    `hidden_weight` times how far some hidden states are from the teacher's.

    An evaluation gives the loss of the labels alone, and tells the metrics how far the student is from its teacher.
    """

    loss_function: LossFunction
    models: Mapping[str, Model]
    """Adds the teacher, except where what it says is stored, and in a job that computes no loss."""
    share: float
    temperature: float
    chunk: int
    divergence: Kind = "forward"
    observed: Callable[[], Mapping[str, Any] | None] = lambda: None
    """The metrics; None in a job without."""
    stored: StoredLogits | None = None
    hidden_weight: float = 0.0
    hidden_states: Callable[[], HiddenStates | None] = lambda: None

    def weight(self, batch: Batch) -> int:
        return int((batch.labels != MASKED).sum())

    def loss(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        head, metrics = part.get_submodule("head"), self.observed()
        if not part.training and (metrics is None or not (self.stored or TEACHER in self.models)):
            return self.loss_function(hidden, head, batch.labels)
        found, (soft, agreeing) = self._compared(head, hidden, batch)
        apart = states.loss(part, batch.labels) if (states := self.hidden_states()) is not None else None
        if metrics is not None:
            kept = (batch.labels != MASKED).sum()
            metrics["divergence"].update(soft, kept)
            if not part.training:
                metrics["agreement"].update(agreeing, kept)
            if apart is not None:
                metrics["hidden"].update(apart.detach(), kept)
        return found if apart is None or not part.training else found + self.hidden_weight * apart

    def outputs(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        logits: Tensor = part.get_submodule("head")(hidden)
        return logits

    def _compared(self, head: nn.Module, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss, and two sums: of the divergence, and in an evaluation of tokens that both models find likeliest."""
        if self.stored:
            loss: Callable[..., tuple[Tensor, Tensor]] = partial(self._from_stored, head, self.stored.vocabulary)
            said = [batch.targets[TOKENS_OF], batch.targets[VALUES_OF].float()]
        else:
            teacher = self.models[TEACHER]
            loss = partial(self._from_teacher, head, teacher.parts[-1].get_submodule("head"))
            with torch.no_grad():
                said = [teacher(batch.inputs, **batch.model_inputs())]
        return sum_in_chunks(loss, head, self.chunk, hidden, batch.labels, *said)

    def _from_teacher(
        self, head: nn.Module, teaching: nn.Module, hidden: Tensor, labels: Tensor, taught: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same, of a chunk, whose logits may be split over ranks."""
        with torch.no_grad():
            theirs = self._tempered(teaching(taught))
            teacher = log_probabilities(theirs)
            top = labels if head.training else full_tensor(theirs).argmax(-1)
        logits = self._logits(head, hidden, theirs.shape[-1])
        student = log_probabilities(self._tempered(logits))
        return self._summed(head, logits, divergence(self.divergence, teacher, student), top, labels)

    def _from_stored(
        self, head: nn.Module, vocabulary: int, hidden: Tensor, labels: Tensor, tokens: Tensor, teacher: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same, over the tokens that the teacher finds likeliest and all others together."""
        logits, tokens = self._logits(head, hidden, vocabulary), tokens.long()
        student = top_log_probabilities(self._tempered(logits), tokens)
        return self._summed(head, logits, divergence(self.divergence, teacher, student), tokens[..., 0], labels)

    def _logits(self, head: nn.Module, hidden: Tensor, vocabulary: int) -> Tensor:
        """The student's logits.

        Raises:
            ConfigError: if they are fewer or more than the teacher's.
        """
        logits: Tensor = head(hidden)
        if vocabulary not in (logits.shape[-1], 0):  # of a plan
            raise ConfigError(
                f"distill.teacher: the teacher's vocabulary has {vocabulary:,} tokens, but the student's has "
                f"{logits.shape[-1]:,}; they must be equal."
            )
        return logits

    def _tempered(self, logits: Tensor) -> Tensor:
        return logits.float() if self.temperature == 1 else logits.float() / self.temperature

    def _summed(
        self, head: nn.Module, logits: Tensor, each: Tensor, top: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        kept = labels != MASKED
        soft = (each * kept).sum()
        share = self.share if head.training else 0.0
        loss = share * self.temperature**2 * soft
        if share < 1:
            loss = loss + (1 - share) * self.loss_function(logits, _Given(logits, head.training), labels)
        agreeing = torch.zeros_like(soft) if head.training else (likeliest(logits, top) & kept).sum().to(soft)
        return loss, torch.stack([soft, agreeing]).detach()


class _Given(nn.Module):
    """A head in the place of another one whose logits are there: each product with its weights is made once."""

    def __init__(self, logits: Tensor, training: bool) -> None:
        super().__init__()
        self.out_features = logits.shape[-1]
        self.train(training)

    def forward(self, logits: Tensor) -> Tensor:
        return logits
