"""The task of the `dpo` plugin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_train import Batch
from forge_train_kit.model import pair_weights
from forge_train_kit.reference.scores import AnswerScores

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
class AnswerPairs(AnswerScores):
    """Rows 2i and 2i + 1 of a micro-batch are the chosen and the rejected answer; every pair counts once."""

    config: DPO.Config
    rows_together = 2

    def weight(self, batch: Batch) -> int:
        return int(pair_weights(batch).sum())

    def loss(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        weights = pair_weights(batch)
        sums, tokens, ratio = self.compared(part, hidden, batch)
        per_token = sums / tokens
        scores, relative = (per_token, ratio / tokens) if self.config.length_normalised else (sums, ratio)
        # A log-probability of 0, as padding has, makes the odds of `orpo` infinite.
        relative = relative.where(weights.repeat_interleave(2) > 0, -1.0)
        if (metrics := self.observed()) is not None:
            rewards = self.config.beta * relative.detach()
            margin = rewards[0::2] - rewards[1::2]
            seen = ((margin > 0).double(), margin, rewards[0::2], rewards[1::2], *scores.detach().view(-1, 2).unbind(1))
            for name, values in zip(METRICS, seen, strict=True):
                metrics[name].update(values, weights=weights)
            if "kl" in metrics:
                metrics["kl"].update(ratio.detach().square().view(-1, 2).mean(1) / 2, weights=weights)
        each = self._losses(relative[0::2], relative[1::2])
        sft_weight = 1.0 if self.config.loss == "orpo" else self.config.sft_weight
        if sft_weight:
            each = each - sft_weight * per_token[0::2]
        return (each * weights).sum()

    def _losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """The loss of each pair, from log-probabilities relative to the reference's, `[pairs]`."""
        config, margin, smoothing = self.config, chosen - rejected, self.config.label_smoothing
        if config.loss == "ipo":
            target = 1 / (2 * config.beta)
            return (1 - smoothing) * (margin - target).square() + smoothing * (margin + target).square()
        if config.loss == "orpo":
            log_odds = margin - (_log_complement(chosen) - _log_complement(rejected))
            return config.beta * _surprise(log_odds, smoothing)
        return _surprise(config.beta * margin - config.target_margin, smoothing)


def _surprise(log_odds: Tensor, smoothing: float) -> Tensor:
    """The cross-entropy of a label that is wrong with the probability `smoothing`."""
    return -(1 - smoothing) * F.logsigmoid(log_odds) - smoothing * F.logsigmoid(-log_odds)


def _log_complement(log_probability: Tensor) -> Tensor:
    """`log(1 − p)` from `log p`."""
    return torch.log(-torch.expm1(log_probability))
