"""The loss function of the `cross_entropy` plugin."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from forge_train import MASKED
from forge_train.nn import full_tensor

LOGITS = 2**23
"""Logits that may exist at once without a second thought: 32 MiB in fp32."""
CHUNKS = 16
"""More chunks than this save little memory, and make the head's matrix products small."""


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
        batch, sequence = labels.shape
        length = max(1, self._tokens(labels.numel(), head) // batch)
        if length >= sequence or not torch.is_grad_enabled():
            pieces = [self._sum(h, head, y) for h, y in _split(hidden, labels, length)]
        else:
            pieces = [checkpoint(self._sum, h, head, y, use_reentrant=False) for h, y in _split(hidden, labels, length)]
        return sum(pieces[1:], pieces[0])

    def _tokens(self, tokens: int, head: nn.Module) -> int:
        """Tokens per chunk. A head that does not say how wide its logits are is taken for a large one."""
        if self.chunk:
            return self.chunk
        vocabulary = getattr(head, "out_features", 2**17)
        return max(LOGITS // vocabulary, tokens // CHUNKS, 1)

    def _sum(self, hidden: Tensor, head: nn.Module, labels: Tensor) -> Tensor:
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


def _split(hidden: Tensor, labels: Tensor, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Along the sequence, so that the head sees `[batch, …, dim]` as ever: tensor parallelism counts on its axes."""
    return zip(torch.split(hidden, length, dim=1), torch.split(labels, length, dim=1), strict=True)
