"""Bytes that tensor parallelism has to send, computed from its plan alone."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .plan import Entry
from .replicas import Whole

CROSSED = {"gather": 1, "summed": 2, "vocabulary": 1, "rowwise": 1, "logits": 1}
"""Style → how often a module's sequences cross ranks, forward, and backward once more (arXiv:2205.05198, §4.2.2)."""


def sent(part: nn.Module, entries: Sequence[Entry], wholes: Sequence[Whole], *, ranks: int, size: int) -> float:
    """Bytes that each rank has to send in a step.

    Args:
        part: as it was before it was split.
        entries: its plan.
        wholes: parameters that stay whole; the gradients of some are summed once a step.
        ranks: that split it.
        size: bytes of one feature of a step's tokens.
    """
    dim = next((width for entry in entries if (width := _dim(entry.module, entry.style))), 0)
    crossings = sum(2 * CROSSED.get(entry.style, 0) for entry in entries)
    parameters = dict(part.named_parameters())
    summed = sum(
        parameters[whole.name].numel() * parameters[whole.name].element_size() for whole in wholes if whole.partial
    )
    norms = sum(4 for entry in entries if entry.style == "features")  # a number for each token, forward and backward
    return ((crossings * dim + norms) * size + 2 * summed) * (ranks - 1) / ranks


def _dim(module: nn.Module, style: str) -> int:
    """Width of the residual stream, as far as a module knows it."""
    outputs = dict.fromkeys(("rowwise", "partial"), "out_features")
    name = {"vocabulary": "embedding_dim", **outputs, "logits": "in_features"}.get(style, "")
    return int(getattr(module, name, 0))
