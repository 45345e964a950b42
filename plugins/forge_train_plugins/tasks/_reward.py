"""The head and the task of the `reward` plugin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from forge_train import Batch, Job
from forge_train_kit.model import Linear, full_tensor, pair_weights, pool


class RewardHead(nn.Module):
    """Hidden states `[…, dim]` → rewards `[…, 1]`."""

    def __init__(self, dim: int, *, std: float) -> None:
        super().__init__()
        self.score = Linear(dim, 1, std=std)

    def forward(self, hidden: Tensor) -> Tensor:
        rewards: Tensor = self.score(hidden)
        return rewards


@dataclass(frozen=True)
class Preferences:
    """Rows 2i and 2i + 1 of a micro-batch are the chosen and the rejected answer; every pair counts once."""

    job: Job
    observed: Callable[[], Mapping[str, Any] | None]
    rows_together = 2

    def weight(self, batch: Batch) -> int:
        return int(pair_weights(batch).sum())

    def loss(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        rewards = self.outputs(part, hidden, batch)
        margin, weights = rewards[0::2] - rewards[1::2], pair_weights(batch)
        if (metrics := self.observed()) is not None:
            metrics["accuracy"].update((margin.detach() > 0).double(), weights=weights)
            metrics["margin"].update(margin.detach(), weights=weights)
        return -(F.logsigmoid(margin) * weights).sum()

    def outputs(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        """`[batch]` fp32."""
        return pool(full_tensor(part.get_submodule("head")(hidden)), batch, self.job).squeeze(-1)
