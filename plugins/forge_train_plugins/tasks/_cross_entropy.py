"""The loss function of the `cross_entropy` plugin."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_train import MASKED
from forge_train_kit.model import full_tensor, sum_in_chunks


@dataclass(frozen=True)
class ChunkedCrossEntropy:
    """Sum over the unmasked tokens of `−Σ q log softmax(logits) + z_loss · (log Σ exp logits)²`.

    q is `1 − label_smoothing` at the label, and the rest is spread evenly over the vocabulary. A head in evaluation
    mode gets only the cross-entropy.

    The sequence is cut into chunks, whose logits never exist together; see `sum_in_chunks`.

    Args:
        z_loss: weight of the second term (PaLM, arXiv:2204.02311, §5).
        chunk: tokens per chunk; 0 chooses automatically.
        label_smoothing: probability taken from the label (Szegedy et al. 2015, arXiv:1512.00567, §7).
    """

    z_loss: float = 0.0
    chunk: int = 0
    label_smoothing: float = 0.0

    def __call__(self, hidden: Tensor, head: nn.Module, labels: Tensor) -> Tensor:
        """`hidden [batch, sequence, dim]`, `labels [batch, sequence]` → 0-dim fp32."""
        return sum_in_chunks(partial(self._sum, head), head, self.chunk, hidden, labels)

    def by_row(self, hidden: Tensor, head: nn.Module, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The same, and each sequence's share of it, `[batch]`, without a graph."""
        return sum_in_chunks(partial(self._sums, head), head, self.chunk, hidden, labels)

    def weighted(self, hidden: Tensor, head: nn.Module, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of each token's loss times its weight, and each sequence's share of it, `[batch]`, without a graph.

        `weights [batch, sequence]` fp32.
        """
        return sum_in_chunks(partial(self._weighted, head), head, self.chunk, hidden, labels, weights)

    def _weighted(self, head: nn.Module, hidden: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(hidden).float().flatten(0, 1)
        each = (
            self._loss(head, logits, F.log_softmax(logits, -1), labels.flatten(), "none").view(labels.shape) * weights
        )
        return each.sum(), each.detach().sum(1)

    def _sum(self, head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = head(hidden).float().flatten(0, 1)
        return self._loss(head, logits, F.log_softmax(logits, -1), labels.flatten(), "sum")

    def _sums(self, head: nn.Module, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The sum, 0-dim, and each row's, `[batch]`."""
        logits, flat = head(hidden).float().flatten(0, 1), labels.flatten()
        log_probabilities = F.log_softmax(logits, -1)
        total = self._loss(head, logits, log_probabilities, flat, "sum")
        with torch.no_grad():
            each = self._loss(head, logits, log_probabilities, flat, "none")
        return total, each.view(labels.shape).sum(1)

    def _loss(
        self, head: nn.Module, logits: Tensor, log_probabilities: Tensor, labels: Tensor, reduction: str
    ) -> Tensor:
        loss = full_tensor(F.nll_loss(log_probabilities, labels, ignore_index=MASKED, reduction=reduction))
        if not head.training or not (self.z_loss or self.label_smoothing):
            return loss
        reduce = torch.sum if reduction == "sum" else torch.clone
        kept = labels != MASKED
        log_partition = full_tensor(logits.logsumexp(-1)) * kept
        if self.label_smoothing:
            mean = full_tensor(logits.sum(-1)) * kept / logits.shape[-1]
            loss = loss + self.label_smoothing * (reduce(log_partition - mean) - loss)
        return loss + self.z_loss * reduce(log_partition.square())
