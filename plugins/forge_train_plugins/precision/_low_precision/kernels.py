"""Products in low precision: torch's float8 kernels where the device has them, plain products elsewhere."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .formats import Blocks, Format
from .minifloat import Minifloat, nearest

ALIGNMENT = 16
"""Divisor that torch's float8 kernels require of each dimension."""

_grouped_mm: Any = getattr(F, "grouped_mm", None) or torch._grouped_mm  # the former since 2.12


@cache
def rows_on_cpu() -> bool:
    """Return True if the CPU's float8 kernel takes a scale per row (torch 2.13 does, 2.11 does not)."""
    ones = torch.ones(ALIGNMENT, ALIGNMENT).to(torch.float8_e4m3fn)
    scales = torch.ones(ALIGNMENT, 1)
    try:
        torch._scaled_mm(ones, ones.t(), scale_a=scales, scale_b=scales.t(), out_dtype=torch.float32)
    except RuntimeError:
        return False
    return True


def lacking(device: torch.device, dtype: torch.dtype, *, rows: bool = False) -> str:
    """Why torch's float8 kernels can't be used; empty if they can.

    The CPU's (torch 2.13) gives the right numbers, slowly.

    Args:
        device: of the tensors.
        dtype: of the product.
        rows: whether each row has a scale.
    """
    if device.type == "cpu":
        return (
            "the CPU's takes one scale for each tensor in this version of torch" if rows and not rows_on_cpu() else ""
        )
    if device.type != "cuda":
        return f"there is none for {device.type!r}"
    if torch.cuda.get_device_capability(device) < (8, 9):
        return f"{torch.cuda.get_device_name(device)} has none (SM 8.9, Ada or Hopper, is the first)"
    return "" if dtype is torch.bfloat16 else "it gives bfloat16 (train.precision = 'bf16')"


def can_group(device: torch.device) -> bool:
    """Return True if there is a float8 kernel for experts too."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _cast(x: Tensor, scale: Tensor, kind: Minifloat, *, stochastic: bool = False) -> Tensor:
    assert kind.dtype is not None
    values = nearest(x / scale, kind, stochastic=True) if stochastic else x / scale
    return values.clamp(-kind.largest, kind.largest).to(kind.dtype)


def lacking_blocks(device: torch.device, dtype: torch.dtype) -> str:
    """Why torch's product of blocks that have a scale each (1 × 128 and 128 × 128) can't be used; empty if it can."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return "only Hopper has one (SM 9.0)"
    cuda = tuple(map(int, (torch.version.cuda or "0").split(".")[:2]))
    if cuda < (12, 9) or not hasattr(F, "scaled_mm"):
        return f"it needs CUDA 12.9, and torch {torch.__version__} was built with {torch.version.cuda or 'none'}"
    return "" if dtype is torch.bfloat16 else "it gives bfloat16 (train.precision = 'bf16')"


def scaled_blocks(a: Tensor, b: Tensor, pair: tuple[Blocks, Blocks], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`a [m, k]`, `b [n, k]` → `a bᵀ [m, n]`, with a scale for each 1 × 128 or 128 × 128 values; and their sum.

    cuBLAS wants the scales of 1 × 128 one column after the other, and those of 128 × 128 in rows of a multiple of 4.
    """
    rows, columns = len(a), len(b)
    if not a.numel() or not b.numel():
        return a.new_zeros(rows, columns, dtype=dtype), a.new_zeros(())
    values, scales, kinds, sound = [], [], [], a.new_zeros(())
    for x, form in zip((a, b), pair, strict=True):
        height = form.block if form.square else ALIGNMENT
        x = F.pad(x, (0, -x.shape[1] % form.block, 0, -x.shape[0] % height))
        scale = form.scale(x)
        each = scale[:: form.block if form.square else 1, :: form.block]
        if form.square:
            each = F.pad(each, (0, -each.shape[1] % 4)).contiguous().t()
        else:
            each = each.t().contiguous().t()
        values.append(_dense(_cast(x, scale, form.kind, stochastic=form.stochastic)))
        scales.append(each)
        kinds.append(F.ScalingType.BlockWise128x128 if form.square else F.ScalingType.BlockWise1x128)
        sound = sound + each.sum()
    out = F.scaled_mm(values[0], values[1].t(), scales[0], kinds[0], scales[1], kinds[1], output_dtype=dtype)
    return out[:rows, :columns], sound


def _dense(x: Tensor) -> Tensor:
    """With the strides of its shape. `contiguous()` leaves those of an axis of length 1, such as the rows of an expert
    that has one, as they are, and kernels refuse them."""
    return x.reshape(-1).view(x.shape)


def scaled(
    a: Tensor,
    b: Tensor,
    pair: tuple[Format, Format],
    scales: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    *,
    fast: bool = False,
) -> Tensor:
    """`a [m, k]`, `b [n, k]` → `a bᵀ [m, n]`, with one scale for each operand or one for each row.

    `fast` lets tensor cores add up in fewer bits than fp32 (Hopper: about 14), as torchao does in the forward pass.
    """
    if not a.numel() or not b.numel():
        return a.new_zeros(len(a), len(b), dtype=dtype)
    a, b = (_padded(_dense(_cast(x, s, one.kind))) for x, s, one in zip((a, b), scales, pair, strict=True))
    of_a, of_b = scales
    if of_a.ndim or of_b.ndim:  # the kernel takes rows for both or for neither
        of_a, of_b = of_a.expand(len(a), 1).contiguous(), of_b.expand(len(b), 1).contiguous().t()
    return torch._scaled_mm(a, b.t(), scale_a=of_a, scale_b=of_b, out_dtype=dtype, use_fast_accum=fast)


def _padded(x: Tensor) -> Tensor:
    """Zeros behind the axis that is contracted."""
    missing = -x.shape[-1] % ALIGNMENT
    return F.pad(x.view(torch.uint8), (0, missing)).view(x.dtype) if missing else x


def scaled_grouped(
    rows: Tensor,
    weight: Tensor,
    sizes: Tensor,
    pair: tuple[Format, Format],
    scales: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    *,
    fast: bool = False,
) -> Tensor:
    """`rows [rows, k]`, `weight [experts, n, k]` → `[rows, n]`, with a scale for each row of both; `fast` as above."""
    narrow = (_dense(_cast(x, s, one.kind)) for x, s, one in zip((rows, weight), scales, pair, strict=True))
    a, b = narrow
    ends = sizes.cumsum(0, dtype=torch.int32)
    of_a, of_b = scales[0].squeeze(-1).contiguous(), scales[1].squeeze(-1).contiguous()
    return torch._scaled_grouped_mm(a, b.transpose(1, 2), of_a, of_b, offs=ends, out_dtype=dtype, use_fast_accum=fast)


def grouped(rows: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
    """`rows [rows, k]`, `weight [experts, n, k]` → `[rows, n]`."""
    if _groupable(rows):
        return _grouped_mm(_dense(rows), weight.transpose(1, 2), offs=sizes.cumsum(0, dtype=torch.int32))  # type: ignore[no-any-return]
    parts = torch.split(rows, [*sizes.tolist(), int(len(rows) - sizes.sum())])
    products = [part @ one.t() for part, one in zip(parts, weight, strict=False)]
    return torch.cat([*products, rows.new_zeros(len(parts[-1]), weight.shape[1])])


def grouped_outer(a: Tensor, b: Tensor, sizes: Tensor) -> Tensor:
    """`a [rows, m]`, `b [rows, n]` → `aᵀ b` over each expert's rows, `[experts, m, n]`."""
    if _groupable(a):
        return _grouped_mm(_dense(a).t(), _dense(b), offs=sizes.cumsum(0, dtype=torch.int32))  # type: ignore[no-any-return]
    bounds = [*sizes.tolist(), int(len(a) - sizes.sum())]
    return torch.stack(
        [x.t() @ y for x, y in zip(torch.split(a, bounds)[:-1], torch.split(b, bounds)[:-1], strict=True)]
    )


def _groupable(rows: Tensor) -> bool:
    """Return True if torch's grouped product takes rows of a multiple of 16 values: on CUDA only in bfloat16."""
    return rows.device.type == "cpu" or rows.dtype is torch.bfloat16
