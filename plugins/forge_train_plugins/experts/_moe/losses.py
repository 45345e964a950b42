"""Auxiliary losses, as sums over tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from .router import Router, Routing


def balance(loads: Tensor, routing: Routing, slices: int, router: Router | None = None) -> Tensor:
    """`N · E · Σ fᵢ Pᵢ`, summed over sets of N tokens (arXiv:2101.03961, eq. 4, for top-k).

    It is 1 per token if all experts have the same load. Where experts are divided into groups, N and E are the tokens
    and experts of a group, and the groups are summed.

    Args:
        loads: assignments in each set, summed over all slices, `[sets, experts]`.
        routing: of this slice; the result is its share of the sum.
        slices: number of slices of each set.
        router: whose experts are divided into groups.
    """
    sets, experts = loads.shape
    mass = routing.shares.view(sets, -1, experts).sum(1)
    if router is not None and router.group is not None:
        found = loads.to(mass.dtype)
        even = router.mean_loads(found)  # N · top_k / E, and 0 only where all loads of a group are
        return (found / even.clamp(min=1 / experts) * mass).sum()
    tokens = len(routing.shares) // sets * slices
    top_k = loads.sum() / (sets * tokens)
    return experts / (tokens * top_k) * (loads.to(mass.dtype) * mass).sum()


def z_loss(routing: Routing) -> Tensor:
    """The squared log-partition, summed over tokens (arXiv:2202.08906, eq. 5)."""
    logits, allowed = routing.logits, routing.allowed
    logits = logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)
    return logits.logsumexp(-1).square().sum()


def entropy(shares: Tensor) -> Tensor:
    """Entropy of the shares in nats, summed over tokens."""
    total: Tensor = torch.special.entr(shares).sum()
    return total
