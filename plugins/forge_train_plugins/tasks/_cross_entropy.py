"""The loss function of the `cross_entropy` plugin."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from forge_train import MASKED
from forge_train.nn import full_tensor, sum_in_chunks


@dataclass(frozen=True)
class ChunkedCrossEntropy:
    """Sum over the unmasked tokens of `−Σ q log softmax(logits) + z_loss · (log Σ exp logits)²`.

    q is `1 − label_smoothing` at the label, and the rest spread evenly over the vocabulary. A head in evaluation mode
    gets the cross-entropy alone.

    The sequence is cut into chunks whose logits are computed once for the loss and once more in the backward pass,
    and freed in between: memory for time, one more product with the head's weights in four.

    Args:
        z_loss: weight of the second term (PaLM, arXiv:2204.02311, §5).
        chunk: tokens per chunk; 0 chooses.
        label_smoothing: what the label gives away (Szegedy et al. 2015, arXiv:1512.00567, §7).
    """

    z_loss: float = 0.0
    chunk: int = 0
    label_smoothing: float = 0.0

    def __call__(self, hidden: Tensor, head: nn.Module, labels: Tensor) -> Tensor:
        """`hidden [batch, sequence, dim]`, `labels [batch, sequence]` → 0-dim fp32."""
        return sum_in_chunks(partial(self._sum, head), head, self.chunk, hidden, labels)

    def _sum(self, head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = head(hidden).float().flatten(0, 1)
        labels = labels.flatten()
        loss = full_tensor(F.cross_entropy(logits, labels, ignore_index=MASKED, reduction="sum"))
        if not head.training or not (self.z_loss or self.label_smoothing):
            return loss
        kept = labels != MASKED
        log_partition = full_tensor(logits.logsumexp(-1)) * kept
        if self.label_smoothing:
            mean = full_tensor(logits.sum(-1)) * kept / logits.shape[-1]
            loss = loss + self.label_smoothing * ((log_partition - mean).sum() - loss)
        return loss + self.z_loss * log_partition.square().sum()
