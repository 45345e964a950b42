"""The head and the task of the `embed` plugin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_train import Batch, Job
from forge_train_kit.model import full_tensor, gather_rows, pair_weights, pool


class NoHead(nn.Module):
    """Returns hidden states unchanged, in full on every rank."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


@dataclass(frozen=True)
class Contrastive:
    """Rows 2i and 2i + 1 of a micro-batch are an anchor and its positive; every pair counts once."""

    job: Job
    temperature: float
    group: int
    """Number of pairs that are each other's negatives."""
    observed: Callable[[], Mapping[str, Any] | None]
    rows_together = 2

    def weight(self, batch: Batch) -> int:
        return int(pair_weights(batch).sum())

    def loss(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        vectors = self.outputs(part, hidden, batch)
        weights = pair_weights(batch)
        anchors, gathered = vectors[0::2], gather_rows(torch.cat([vectors[1::2], weights[:, None]], 1), self.job)
        positives, padding = gathered[:, :-1], gathered[:, -1] == 0
        own = torch.arange(len(anchors), device=hidden.device) + self.job.dist.data_rank * len(anchors)
        others = torch.arange(len(positives), device=hidden.device)
        apart = (own[:, None] // self.group != others // self.group) | (padding & (own[:, None] != others))
        similarity = (anchors @ positives.T / self.temperature).masked_fill(apart, -torch.inf)
        if (metrics := self.observed()) is not None:
            right = similarity.detach().gather(1, own[:, None])
            rank = 1 + (similarity.detach() > right).sum(1)
            metrics["recall_at_1"].update((rank == 1).double(), weights=weights)
            metrics["mrr"].update(1 / rank.double(), weights=weights)
        return (F.cross_entropy(similarity, own, reduction="none") * weights).sum()

    def outputs(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        """Unit vectors `[batch, dim]` fp32."""
        pooled = pool(full_tensor(part.get_submodule("head")(hidden)), batch, self.job)
        return F.normalize(pooled, dim=-1)
