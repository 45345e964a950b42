"""The task of the `dpo` plugin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_train import Batch, Job
from forge_train_kit.model import pair_weights, row_log_probabilities, without_updates

from ._stored_reference import TARGET

if TYPE_CHECKING:
    from .dpo import DPO

METRICS = (
    "accuracy",
    "margin",
    "chosen_reward",
    "rejected_reward",
    "chosen_log_probability",
    "rejected_log_probability",
)


@dataclass
class AnswerPairs:
    """Rows 2i and 2i + 1 of a micro-batch are the chosen and the rejected answer; every pair counts once."""

    job: Job
    config: DPO.Config
    observed: Callable[[], Mapping[str, Any] | None]
    own_reference: bool = False
    """The reference is the model without its updates, not a second one."""
    moved: bool = False
    """True once the model has scored an answer differently from its reference."""
    rows_together = 2

    def weight(self, batch: Batch) -> int:
        return int(pair_weights(batch).sum())

    def loss(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        head, weights = part.get_submodule("head"), pair_weights(batch)
        sums, tokens = row_log_probabilities(hidden, head, batch.labels, self.job, chunk=self.config.chunk)
        tokens = tokens.clamp(min=1)  # padding has none
        scores = sums / tokens if self.config.length_normalised else sums
        relative = scores - self._reference(part, batch, tokens)
        if self.own_reference and not self.moved and relative.any():
            self.moved = True
        # A log-probability of 0, as padding has, makes the odds of `orpo` infinite.
        relative = relative.where(weights.repeat_interleave(2) > 0, -1.0)
        if (metrics := self.observed()) is not None:
            rewards = self.config.beta * relative.detach()
            margin = rewards[0::2] - rewards[1::2]
            seen = ((margin > 0).double(), margin, rewards[0::2], rewards[1::2], *scores.detach().view(-1, 2).unbind(1))
            for name, values in zip(METRICS, seen, strict=True):
                metrics[name].update(values, weights=weights)
        each = self._losses(relative[0::2], relative[1::2])
        sft_weight = 1.0 if self.config.loss == "orpo" else self.config.sft_weight
        if sft_weight:
            each = each - sft_weight * (sums / tokens)[0::2]
        return (each * weights).sum()

    def outputs(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        logits: Tensor = part.get_submodule("head")(hidden)
        return logits

    @torch.no_grad()
    def _reference(self, part: nn.Module, batch: Batch, tokens: Tensor) -> Tensor | float:
        """The reference's log-probability of each row, `[batch]`; 0 without a reference."""
        if (stored := batch.targets.get(TARGET)) is not None:
            return stored / tokens if self.config.length_normalised else stored
        if self.own_reference:
            with without_updates(part):
                return self._scores(part, part(batch.inputs, **batch.model_inputs()), batch)
        if (reference := self.job.models.get("reference")) is None:
            return 0.0
        return self._scores(reference.parts[-1], reference(batch.inputs, **batch.model_inputs()), batch)

    def _scores(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        head = part.get_submodule("head")
        sums, tokens = row_log_probabilities(hidden, head, batch.labels, self.job, chunk=self.config.chunk)
        return sums / tokens.clamp(min=1) if self.config.length_normalised else sums

    def _losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """The loss of each pair, from log-probabilities relative to the reference's, `[pairs]`."""
        config, margin = self.config, chosen - rejected
        if config.loss == "ipo":
            return (margin - 1 / (2 * config.beta)).square()
        if config.loss == "orpo":
            log_odds = margin - (_log_complement(chosen) - _log_complement(rejected))
            return -config.beta * F.logsigmoid(log_odds)
        scaled = config.beta * margin - config.target_margin
        smoothing = config.label_smoothing
        return -(1 - smoothing) * F.logsigmoid(scaled) - smoothing * F.logsigmoid(-scaled)


def _log_complement(log_probability: Tensor) -> Tensor:
    """`log(1 − p)` from `log p`."""
    return torch.log(-torch.expm1(log_probability))
