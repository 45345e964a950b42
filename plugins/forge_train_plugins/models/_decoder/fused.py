"""The decoder's side of a fusion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from forge_train_kit.model import ITEM_POSITIONS, ItemPositions, Shift, Slots, SlotShift

SHIFT = "shift"
"""The entry of a cache beside those of layers."""


def features(fusion: Any, items: Mapping[str, Tensor], cache: Mapping[str, Any] | None, tokens: int) -> dict[str, Any]:
    """Arguments of the modules before layers: the extras, and what it makes of them.

    Args:
        fusion: of a part.
        items: extras of the batch.
        cache: of the model's part, while text is generated.
        tokens: of this forward.
    """
    if not hasattr(fusion, "features") or not fusion.layers:
        return dict(items)
    if not cache:
        return {**items, **fusion.features(**items)}
    return {**items, **fusion.features(cache=cache["fusion"], tokens=tokens, **items)}


def layer_positions(
    axes: ItemPositions | None,
    items: dict[str, Tensor],
    position_ids: Tensor | None,
    document_ids: Tensor | None,
    cache: Mapping[str, Any] | None,
) -> Tensor | None:
    """The positions by which layers rotate: those given, or along three axes, `[batch, sequence, 3]`.

    Args:
        axes: of a model whose rotations follow them.
        items: extras of the batch; prepared positions are taken out.
        position_ids: of this forward.
        document_ids: of this forward.
        cache: of the model's part, while text is generated.
    """
    prepared = items.pop(ITEM_POSITIONS, None)
    if axes is None:  # the positions were made for another model of this run
        return position_ids
    if prepared is not None:
        return prepared
    shift = cache[SHIFT] if cache else None
    before = 0 if shift is None else shift.get()
    position_ids = position_ids if position_ids is None else position_ids + before
    found = axes(items, position_ids, document_ids)
    if found is None:
        return position_ids
    if shift is not None:
        shift.put(before + found[1])
    return found[0]


def row_positions(ids: Tensor, position_ids: Tensor | None) -> Tensor:
    """The positions that have embeddings of their own: those given, or of each token in its row."""
    return torch.arange(ids.shape[1], device=ids.device)[None] if position_ids is None else position_ids


def with_cache(
    caches: dict[str, Any], fusion: Any, axes: ItemPositions | None, slots: Slots | None = None
) -> dict[str, Any]:
    """The layers' caches, the fusion's, and what items change of later positions.

    Raises:
        TypeError: if the fusion has none.
    """
    if axes is not None:
        caches[SHIFT] = Shift() if slots is None else SlotShift(slots)
    if not hasattr(fusion, "features") or not fusion.layers:
        return caches
    make = "new_cache" if slots is None else "new_slots"
    if not hasattr(fusion, make):
        raise TypeError(f"{type(fusion).__name__} can't generate like that: it has no cache for items ({make})")
    caches["fusion"] = fusion.new_cache() if slots is None else fusion.new_slots(slots)
    return caches


def beside(fusion: Any, index: str) -> tuple[str, ...]:
    """Names of modules that stay with a layer."""
    if fusion is None:
        return ()
    joined = [f"layers.{index}"] if index in fusion.layers else []
    return tuple(f"fusion.{name}" for name in (*joined, *getattr(fusion, "beside", {}).get(index, ())))
