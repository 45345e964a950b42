"""What the tests of low-precision plugins share."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from forge_train_plugins.precision._low_precision.products import ALONE, GroupedProduct, LinearProduct, Recipe

Layer = Callable[[Tensor, Tensor], Tensor]


def decibels(exact: Tensor, found: Tensor) -> float:
    """Signal to noise."""
    return float(20 * torch.log10(exact.double().norm() / (found.double() - exact.double()).norm()))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a.view(torch.int32) == b.view(torch.int32)).all())


def operands(seed: int = 0, tokens: int = 256, inputs: int = 384, outputs: int = 256) -> tuple[Tensor, Tensor, Tensor]:
    """Input, weight, and gradient of the output."""
    draw = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(tokens, inputs, generator=draw), torch.randn(outputs, inputs, generator=draw) * 0.02
    return x, weight, torch.randn(tokens, outputs, generator=draw) * 1e-3


def passes(layer: Layer, x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """Output, gradient of the input, gradient of the weight."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    out = layer(x, weight)
    return (out.detach(), *torch.autograd.grad(out, (x, weight), gradient.to(out.dtype)))


def exact(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t()


def linear(recipe: Recipe) -> Layer:
    def layer(x: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = LinearProduct.apply(x, weight, recipe, ALONE)[0]
        return out

    return layer


def grouped(recipe: Recipe, sizes: Tensor) -> Layer:
    def layer(rows: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = GroupedProduct.apply(rows, weight, sizes, recipe)[0]
        return out

    return layer


def looped(recipe: Recipe | None, sizes: list[int]) -> Layer:
    """One linear layer for each expert, of the same recipe."""
    one = exact if recipe is None else linear(recipe)

    def layer(rows: Tensor, weight: Tensor) -> Tensor:
        parts = torch.split(rows, [*sizes, len(rows) - sum(sizes)])
        rest = rows.new_zeros(len(parts[-1]), weight.shape[1])
        return torch.cat([one(part, weight[index]) for index, part in enumerate(parts[:-1]) if len(part)] + [rest])

    return layer


def torchao_layer(name: str, **changes: Any) -> Layer:
    """torchao's own float8 product, emulated."""
    from dataclasses import replace

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.float8 import Float8LinearConfig
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
        from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

    config = replace(Float8LinearConfig.from_recipe_name(name), emulate=True, **changes)
    emulated = ScaledMMConfig(True, False, False, False)
    product = LinearMMConfig(emulated, emulated, emulated)

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = matmul_with_hp_or_float8_args.apply(x, weight.t(), product, config)
        return out

    return layer
