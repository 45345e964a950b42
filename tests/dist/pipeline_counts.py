"""How often a pipeline computes what."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

from forge_train_plugins.precision._low_precision import layers, products
from forge_train_tools.testing import run_forge


def products_of(folder: str, schedule: str) -> dict[str, int]:
    """Eight-bit products of a run of two steps, by what they give."""
    found = {"forward": 0, "inputs": 0, "weights": 0}
    right = products.multiply
    recipe: list[Any] = []

    def counted(a: Any, b: Any, pair: Any, splits: Any, dtype: Any, **how: Any) -> Any:
        kinds = [name for name, one in recipe if one is pair]
        found[kinds[0] if kinds else "forward"] += 1
        return right(a, b, pair, splits, dtype, **how)

    class Told(products.LinearProduct):
        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            recipe[:] = [("inputs", ctx.recipe.grad_input), ("weights", ctx.recipe.grad_weight)]
            try:
                return products_backward(ctx, *gradients)
            finally:
                recipe.clear()

    products_backward = products.LinearProduct.backward
    settings = {
        "parallel.pp": 2,
        "pp.schedule": schedule,
        "decoder.layers": 4,
        "train.global_batch": 8,
        "train.micro_batch": 2,
    }
    with patch.object(products, "multiply", counted), patch.object(layers, "LinearProduct", Told):
        run_forge(("pp", "fp8"), settings, steps=2, folder=Path(folder))
    return found
