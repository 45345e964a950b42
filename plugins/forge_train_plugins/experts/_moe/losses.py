"""Auxiliary losses, as sums over tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from .router import Routing


def balance(loads: Tensor, routing: Routing, slices: int) -> Tensor:
    """`N · E · Σ fᵢ Pᵢ`, summed over sets of N tokens (arXiv:2101.03961, eq. 4, for top-k).

    It is 1 per token if all experts have the same load.

    Args:
        loads: assignments in each set, summed over all slices, `[sets, experts]`.
        routing: of this slice; the result is its share of the sum.
        slices: number of slices of each set.
    """
    sets, experts = loads.shape
    mass = routing.shares.view(sets, -1, experts).sum(1)
    tokens = len(routing.shares) // sets * slices
    top_k = loads.sum() / (sets * tokens)
    return experts / (tokens * top_k) * (loads.to(mass.dtype) * mass).sum()


def z_loss(logits: Tensor) -> Tensor:
    """The squared log-partition, summed over tokens (arXiv:2202.08906, eq. 5)."""
    return logits.logsumexp(-1).square().sum()


def entropy(shares: Tensor) -> Tensor:
    """Entropy of the shares in nats, summed over tokens."""
    total: Tensor = torch.special.entr(shares).sum()
    return total
