"""Kernels that only a GPU has, with their published signatures: attention by its formula, document by document."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def flash_2(  # noqa: PLR0917 — as it is published
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> Tensor:
    """The causal mask and the window count from the bottom right of each document."""
    assert causal
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert len({one.device for one in (q, k, v, cu_seqlens_q, cu_seqlens_k)}) == 1
    assert not q.is_cuda or q.dtype in (torch.bfloat16, torch.float16)
    bounds, most = [_values(cu_seqlens_q), _values(cu_seqlens_k)], [max_seqlen_q, max_seqlen_k]
    assert all(isinstance(one, int) for one in most)
    assert [max(end - start for start, end in pairwise(one)) for one in bounds] == most
    assert [one[-1] for one in bounds] == [len(q), len(k)]
    left = -1 if window_size[0] is None else window_size[0]
    scale, groups, outs = softmax_scale or q.shape[-1] ** -0.5, q.shape[1] // k.shape[1], []
    for (a, b), (c, d) in zip(*map(pairwise, bounds), strict=True):
        keys, values = (one[c:d].float().repeat_interleave(groups, 1) for one in (k, v))
        logits = torch.einsum("qhd,khd->hqk", q[a:b].float(), keys) * scale
        rows = torch.arange(d - c - (b - a), d - c, device=q.device)[:, None]
        columns = torch.arange(d - c, device=q.device)
        hidden = columns > rows
        if left >= 0:
            hidden = hidden | (columns < rows - left)
        outs.append(torch.einsum("hqk,khd->qhd", logits.masked_fill(hidden, -torch.inf).softmax(-1), values))
    return torch.cat(outs).to(q.dtype)


def flash_3(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **asked: Any) -> Any:
    """Version 3 as it was at first: the log-sum-exp comes along."""
    return flash_2(q, k, v, cu_seqlens_q, cu_seqlens_k, **asked), None


def flash_4(q: Tensor, k: Tensor, v: Tensor, qv: None = None, *, window_size: Any, **asked: Any) -> Any:
    """Version 4: another place for the bounds, and None for no window."""
    assert -1 not in window_size
    return flash_2(q, k, v, window_size=window_size, **asked), None


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """Of torch 2.13: (-1, 0) is causal."""
    assert window_size[1] == 0
    assert enable_gqa == (query.shape[1] != key.shape[1])
    more: dict[str, Any] = {"deterministic": torch.are_deterministic_algorithms_enabled(), "causal": True}
    more |= {"softmax_scale": scale, "window_size": window_size}
    return flash_2(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **more)


def varlen_attn_2_11(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Before `enable_gqa`: as many key heads as query heads."""
    return varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)


def _values(bounds: Tensor) -> list[int]:
    """Of a pretended device too, without what would count as a wait."""
    found: list[int] = (torch.ops.pretended_cuda.host(bounds) if bounds.is_cuda else bounds).tolist()
    return found


def scaled_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor,
    scale_recipe_a: Any,
    scale_b: Tensor,
    scale_recipe_b: Any,
    *,
    output_dtype: torch.dtype,
) -> Tensor:
    """Blocks of 1 × 128 and 128 × 128, laid out as cuBLAS wants them (ScaledBlas.cpp of torch 2.13)."""
    kinds, (rows, inner), columns = F.ScalingType, mat_a.shape, mat_b.shape[1]
    assert mat_a.dtype == mat_b.dtype == torch.float8_e4m3fn
    assert output_dtype is torch.bfloat16
    assert mat_a.stride() == (inner, 1)
    assert mat_b.stride() == (1, inner)
    assert not any(size % 16 for size in (rows, inner, columns))
    assert (scale_recipe_a, scale_recipe_b) != (kinds.BlockWise128x128, kinds.BlockWise128x128)
    wide = []
    for values, scales, kind in ((mat_a, scale_a, scale_recipe_a), (mat_b.t(), scale_b, scale_recipe_b)):
        along = -(-inner // 128)
        assert scales.dtype is torch.float32
        if kind is kinds.BlockWise1x128:
            assert scales.shape == (len(values), along)
            assert scales.stride() == (1, len(values))
            each = scales
        else:
            assert kind is kinds.BlockWise128x128
            assert scales.shape == (-(-along // 4) * 4, -(-len(values) // 128))
            assert scales.stride() == (1, len(scales))
            each = scales.t()[:, :along].repeat_interleave(128, 0)[: len(values)]
        wide.append(values.float() * each.repeat_interleave(128, 1)[:, :inner])
    return (wide[0] @ wide[1].t()).to(output_dtype)
