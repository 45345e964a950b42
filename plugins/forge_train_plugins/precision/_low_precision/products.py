"""Products of rounded operands, with products of rounded operands as gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forge_train_kit.pipeline import wanted_gradients

from . import kernels
from .formats import Blocks, Format, Split, rounded

Pair = tuple[Format, Format]
Splits = tuple[Split | None, Split | None]


@dataclass(frozen=True)
class Recipe:
    """Formats of the operands of a linear layer's three products; None leaves a product in full precision.

    Args:
        forward: input and weight, contracted over the layer's inputs.
        grad_input: gradient and weight, contracted over its outputs.
        grad_weight: gradient and input, contracted over tokens.
        kernel: multiply with a kernel of the device; otherwise operands are rounded and multiplied as they are, with
            sums in fp32.
    """

    forward: Pair
    grad_input: Pair | None
    grad_weight: Pair | None
    kernel: bool = False

    @property
    def block(self) -> int:
        """The longest run of values along an axis that share a scale, where it is given."""
        return max(one.block for pair in (self.forward, self.grad_input, self.grad_weight) if pair for one in pair)


@dataclass(frozen=True)
class Parallel:
    """Split of a weight `[out, in]` by tensor parallelism, and of the operands that it meets."""

    group: str = ""
    axis: int = 0

    @property
    def forward(self) -> Splits:
        """Of input and weight."""
        return self._pair(whole=(None, self._outer), cut=1)

    @property
    def grad_input(self) -> Splits:
        """Of gradient and weight."""
        return self._pair(whole=(None, self._outer), cut=0)

    @property
    def grad_weight(self) -> Splits:
        """Of gradient and input: tokens are not split."""
        return self._pair(whole=(self._outer, None) if self.axis == 0 else (None, self._outer), cut=-1)

    @property
    def _outer(self) -> Split:
        return Split(self.group, inner=False)

    def _pair(self, *, whole: Splits, cut: int) -> Splits:
        if not self.group:
            return None, None
        inner = Split(self.group, inner=True)
        return (inner, inner) if self.axis == cut else whole


ALONE = Parallel()


def multiply(
    a: Tensor, b: Tensor, pair: Pair, splits: Splits, dtype: torch.dtype, *, kernel: bool, fast: bool = False
) -> tuple[Tensor, Tensor]:
    """`a [m, k]`, `b [n, k]` → `a bᵀ [m, n]`, and a sum of scales: not finite where one of them is not."""
    a, b = a.float(), b.float()
    if kernel and isinstance(pair[0], Blocks) and isinstance(pair[1], Blocks):
        return kernels.scaled_blocks(a, b, (pair[0], pair[1]), dtype)
    scales = pair[0].scale(a, splits[0]), pair[1].scale(b, splits[1])
    sound = scales[0].sum() + scales[1].sum()
    if kernel:
        return kernels.scaled(a, b, pair, scales, dtype, fast=fast), sound
    a, b = _rounded(a, b, pair, scales, dtype)
    return _given(a @ b.t(), dtype), sound


def _given(product: Tensor, dtype: torch.dtype) -> Tensor:
    """In a dtype. Compiled by torch 2.11, a function whose output went through a `to` that changes nothing is given
    zeros for its gradient."""
    return product if product.dtype is dtype else product.to(dtype)


def _rounded(a: Tensor, b: Tensor, pair: Pair, scales: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[Any, Any]:
    """The operands' values, in bfloat16 where that is wide enough and asked for."""
    narrow = dtype is torch.bfloat16 and pair[0].narrow and pair[1].narrow
    values = rounded(a, scales[0], pair[0]), rounded(b, scales[1], pair[1])
    return (values[0].to(dtype), values[1].to(dtype)) if narrow else values


class LinearProduct(torch.autograd.Function):
    """`x [tokens, in]`, `weight [out, in]` → `x Wᵀ [tokens, out]`, and the sum of scales."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: Recipe, parallel: Parallel) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.recipe, ctx.parallel = recipe, parallel
        how = recipe.forward, parallel.forward, x.dtype
        out, sound = multiply(x, weight, *how, kernel=recipe.kernel, fast=True)
        ctx.mark_non_differentiable(sound)
        return out, sound

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (x, weight), gradient = ctx.saved_tensors, gradients[0]
        recipe, parallel = ctx.recipe, ctx.parallel

        def product(a: Tensor, b: Tensor, pair: Pair | None, splits: Splits) -> Tensor:
            return a @ b.t() if pair is None else multiply(a, b, pair, splits, x.dtype, kernel=recipe.kernel)[0]

        of_x, of_weight, wanted = None, None, wanted_gradients()
        if ctx.needs_input_grad[0] and wanted != "weight":
            of_x = product(gradient, weight.t(), recipe.grad_input, parallel.grad_input)
        if ctx.needs_input_grad[1] and wanted != "input":
            of_weight = product(gradient.t(), x.t(), recipe.grad_weight, parallel.grad_weight)
        return of_x, of_weight, None, None


class GroupedProduct(torch.autograd.Function):
    """`rows [rows, in]` sorted by expert, `weight [experts, out, in]`, `sizes [experts]` → `[rows, out]`, and the sum
    of scales. No two experts share a scale. Rows beyond the sum of sizes are taken for zeros."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, sizes: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows, weight, sizes)
        ctx.recipe = recipe
        out, sound = _grouped(rows, weight, sizes, recipe.forward, kernel=recipe.kernel, fast=True)
        ctx.mark_non_differentiable(sound)
        return out, sound

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (rows, weight, sizes), gradient = ctx.saved_tensors, gradients[0]
        recipe = ctx.recipe
        of_rows, of_weight, wanted = None, None, wanted_gradients()
        if ctx.needs_input_grad[0] and wanted != "weight":
            of_rows, _ = _grouped(gradient, weight.transpose(1, 2), sizes, recipe.grad_input, kernel=recipe.kernel)
        if ctx.needs_input_grad[1] and wanted != "input":
            of_weight = _grouped_weights(gradient, rows, sizes, recipe.grad_weight)
        return of_rows, of_weight, None, None


def _grouped(
    rows: Tensor, weight: Tensor, sizes: Tensor, pair: Pair | None, *, kernel: bool, fast: bool = False
) -> tuple[Tensor, Tensor]:
    """`rows [rows, k]`, `weight [experts, n, k]` → `[rows, n]`."""
    dtype, rows = rows.dtype, _own(rows, sizes)
    if pair is None or not len(rows):
        return kernels.grouped(rows, weight, sizes), rows.new_zeros((), dtype=torch.float32)
    rows, weight = rows.float(), weight.float()
    scales = pair[0].scale(rows), pair[1].scale(weight)
    sound = scales[0].sum() + scales[1].sum()
    if kernel:
        return kernels.scaled_grouped(rows, weight, sizes, pair, scales, dtype, fast=fast), sound
    rows, weight = _rounded(rows, weight, pair, scales, dtype)
    return _given(kernels.grouped(rows, weight, sizes), dtype), sound


def _grouped_weights(gradient: Tensor, rows: Tensor, sizes: Tensor, pair: Pair | None) -> Tensor:
    """`gradient [rows, out]`, `rows [rows, in]` → `[experts, out, in]`, contracted over each expert's rows."""
    dtype, gradient, rows = rows.dtype, _own(gradient, sizes), _own(rows, sizes)
    if pair is None or not len(rows):
        return kernels.grouped_outer(gradient, rows, sizes)
    a, b = gradient.float().t(), rows.float().t()
    a, b = _rounded(a, b, pair, (pair[0].scale(a, sizes=sizes), pair[1].scale(b, sizes=sizes)), dtype)
    return _given(kernels.grouped_outer(a.t(), b.t(), sizes), dtype)


def _own(rows: Tensor, sizes: Tensor) -> Tensor:
    """Set unused rows to zero: their content would spoil the scales."""
    used = torch.arange(len(rows), device=rows.device) < sizes.sum()
    return torch.where(used.unsqueeze(1), rows, 0.0)
