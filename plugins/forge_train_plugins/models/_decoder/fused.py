"""The decoder's side of a fusion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def features(fusion: Any, items: Mapping[str, Tensor], cache: Mapping[str, Any] | None, tokens: int) -> dict[str, Any]:
    """Arguments of the modules before layers: the extras, and what it makes of them.

    Args:
        fusion: of a part.
        items: extras of the batch.
        cache: of the model's part, while text is generated.
        tokens: of this forward.

    Raises:
        TypeError: if there are items, and the cache has no place for them.
    """
    if not hasattr(fusion, "features") or not fusion.layers:
        return dict(items)
    if not cache:
        return {**items, **fusion.features(**items)}
    if "fusion" in cache:
        return {**items, **fusion.features(cache=cache["fusion"], tokens=tokens, **items)}
    if items:
        raise TypeError(f"{type(fusion).__name__} has no cache for the items of rows side by side")
    return {}


def with_cache(caches: dict[str, Any], fusion: Any) -> dict[str, Any]:
    """The layers' caches, and the fusion's."""
    if hasattr(fusion, "new_cache") and fusion.layers:
        caches["fusion"] = fusion.new_cache()
    return caches


def beside(fusion: Any, index: str) -> tuple[str, ...]:
    """Names of modules that stay with a layer."""
    if fusion is None:
        return ()
    joined = [f"layers.{index}"] if index in fusion.layers else []
    return tuple(f"fusion.{name}" for name in (*joined, *getattr(fusion, "beside", {}).get(index, ())))
