"""Kernels that only a GPU has, with their published signatures: attention by its formula, document by document."""

from __future__ import annotations

import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention import varlen


def packed(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, key_ends: Tensor, scale: float, window: int) -> Tensor:
    bounds = [torch.ops.pretended_cuda.host(one).tolist() for one in (ends, key_ends)]
    groups, outs = q.shape[1] // k.shape[1], []
    for a, b, c, d in zip(bounds[0], bounds[0][1:], bounds[1], bounds[1][1:], strict=False):
        keys, values = (one[c:d].float().repeat_interleave(groups, 1) for one in (k, v))
        logits = torch.einsum("qhd,khd->hqk", q[a:b].float(), keys) * scale
        rows = torch.arange(d - c - (b - a), d - c, device=q.device)[:, None]
        columns = torch.arange(d - c, device=q.device)
        hidden = columns > rows
        if window >= 0:
            hidden = hidden | (columns < rows - window)
        outs.append(torch.einsum("hqk,khd->qhd", logits.masked_fill(hidden, -torch.inf).softmax(-1), values))
    return torch.cat(outs).to(q.dtype)


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
    assert query.is_cuda
    assert cu_seq_q.is_cuda
    assert cu_seq_q.dtype is torch.int32
    assert query.dtype in (torch.bfloat16, torch.float16)
    assert window_size[1] == 0
    assert isinstance(max_q, int)
    assert isinstance(max_k, int)
    assert enable_gqa or query.shape[1] == key.shape[1]
    return packed(query, key, value, cu_seq_q, cu_seq_k, scale or query.shape[-1] ** -0.5, window_size[0])


def flash_attn_varlen_func(  # noqa: PLR0917 — as it is published
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
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> Tensor:
    assert causal
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    return packed(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale or q.shape[-1] ** -0.5, window_size[0])


def _module(name: str, **content: Any) -> None:
    made = types.ModuleType(name)
    made.__path__, made.__spec__ = [], ModuleSpec(name, None, is_package=True)
    vars(made).update(content)
    sys.modules[name] = made


varlen.varlen_attn = varlen_attn
_module("flash_attn", flash_attn_varlen_func=flash_attn_varlen_func)
_module("flash_attn_2_cuda")
_compile: Any = torch.compile


def compile_all_but_flex(function: Any = None, **options: Any) -> Any:
    """FlexAttention runs unfused: the kernel that torch would generate needs a device."""
    return function if function is flex.flex_attention else _compile(function, **options)


torch.compile = compile_all_but_flex
