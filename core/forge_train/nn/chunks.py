"""Losses computed in chunks, so that a head's outputs never exist all at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

LOGITS = 2**23
"""Number of logits that may always exist at once: 32 MiB in fp32."""
CHUNKS = 16
"""More chunks than this save little memory and make the head's matrix products small."""


def sum_in_chunks(loss: Callable[..., Tensor], head: nn.Module, tokens: int, *along: Tensor) -> Tensor:
    """The sum of a loss over chunks of the sequence; each chunk is recomputed in the backward pass, and freed in
    between.

    Args:
        loss: the loss of one chunk of each tensor; 0-dim, or of the same shape for each chunk.
        head: the module that it calls.
        tokens: per chunk; 0 chooses.
        along: `[batch, sequence, …]`. They are cut along the sequence, so that the head still gets `[batch, …, dim]`,
            because tensor parallelism relies on its axes.
    """
    batch, sequence = along[0].shape[:2]
    length = max(1, (tokens or chosen(batch * sequence, head)) // batch)
    pieces = zip(*(torch.split(one, length, dim=1) for one in along), strict=True)
    if length >= sequence or not torch.is_grad_enabled():
        losses = [loss(*piece) for piece in pieces]
    else:
        losses = [checkpoint(loss, *piece, use_reentrant=False) for piece in pieces]
    return sum(losses[1:], losses[0])


def chosen(tokens: int, head: nn.Module) -> int:
    """Tokens per chunk. A head that does not declare the width of its logits is assumed to be large."""
    return max(LOGITS // getattr(head, "out_features", 2**17), tokens // CHUNKS, 1)
