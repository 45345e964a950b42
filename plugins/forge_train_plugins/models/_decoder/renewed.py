"""Caches of a model whose rotary positions depend on the sequence's length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from forge_train_kit.model import DynamicRoPE, LengthRoPE, Slots


class RenewedCaches(dict[str, Any]):
    """The caches of all layers. They start again once, when a sequence outgrows the original context: from then on, all
    its positions have other frequencies, and therefore other keys, values and hidden states.

    Args:
        caches: one for each layer.
        after: length of the original context, in tokens.
    """

    def __init__(self, caches: Mapping[str, Any], after: int) -> None:
        super().__init__(caches)
        self._after, self._ids = after, torch.empty(0)

    def take(self, ids: Tensor) -> Tensor:
        """The ids that the layers must see: the new ones, or all ids so far."""
        held = next(iter(self.values())).length
        self._ids = torch.cat([self._ids, ids], 1) if held else ids
        if not 0 < held <= self._after < self._ids.shape[1]:
            return ids
        for one in self.values():
            one.length = 0
        return self._ids


def new_caches(attention: Mapping[str, Any], batch: int, length: int) -> dict[str, Any]:
    """The caches of all layers.

    Raises:
        TypeError: if a layer has none.
    """
    if lacking := next((type(one).__name__ for one in attention.values() if not hasattr(one, "new_cache")), ""):
        raise TypeError(f"{lacking} can't generate: it has no cache for keys and values (new_cache)")
    return {index: one.new_cache(batch, length) for index, one in attention.items()}


def renewed(caches: dict[str, Any], attention: Sequence[Any], length: int) -> dict[str, Any]:
    """The same caches, or ones that start again, if the positions need it.

    Raises:
        TypeError: if a cache of that length is impossible.
    """
    rope = _by_length(attention)
    if rope is None or length <= rope.original_length:
        return caches
    if isinstance(rope, DynamicRoPE):
        raise TypeError("the scaling 'dynamic' changes all keys with each token, so they can't be cached")
    return RenewedCaches(caches, rope.original_length)


def slots_of(attention: Mapping[str, Any], slots: Slots, longest: int) -> dict[str, Any]:
    """The caches of all layers for rows side by side.

    Raises:
        TypeError: if a layer has none, or keys change with the length of their row.
    """
    rope = _by_length([*attention.values()])
    if rope is not None and longest > rope.original_length:
        raise TypeError("keys change with the length of their row")
    if lacking := next((type(one).__name__ for one in attention.values() if not hasattr(one, "new_slots")), ""):
        raise TypeError(f"{lacking} has no cache for rows side by side (new_slots)")
    return {index: one.new_slots(slots) for index, one in attention.items()}


def _by_length(attention: Sequence[Any]) -> LengthRoPE | None:
    ropes = (getattr(one, "rope", None) for one in attention)
    return next((one for one in ropes if isinstance(one, LengthRoPE)), None)
