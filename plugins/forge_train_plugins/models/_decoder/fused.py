"""The decoder's side of a fusion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from forge_train_kit.model import Slots


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


def with_cache(caches: dict[str, Any], fusion: Any, slots: Slots | None = None) -> dict[str, Any]:
    """The layers' caches, and the fusion's.

    Raises:
        TypeError: if it has none.
    """
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
