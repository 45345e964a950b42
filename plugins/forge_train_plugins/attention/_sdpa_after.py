"""Causal attention of queries that come after other tokens, on a CPU, without a mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def after_others(query: Tensor, key: Tensor, value: Tensor, offset: int, scale: float | None = None) -> Tensor:
    """Attention to all tokens before the queries, and to the queries themselves up to each one.

    Args:
        query: `[batch, queries, heads, head_dim]`.
        key: `[batch, offset + queries, kv_heads, head_dim]`.
        value: as `key`.
        offset: tokens before the queries, at least 1.
        scale: of the logits, 1/√head_dim by default.

    Returns:
        As `query`.
    """
    found: Tensor = _AfterOthers.apply(query, key, value, offset, scale)  # type: ignore[no-untyped-call]
    return found


class _AfterOthers(torch.autograd.Function):
    """torch's causal kernel needs as many queries as keys. So it is called twice: for the earlier tokens, which every
    query sees, and for the queries' own. The results are merged by their log-sum-exp in float32 or float64
    (arXiv:1805.02867).

    The kernel's backward takes the result and the log-sum-exp over all keys. With these, each call gives its keys'
    exact share of the gradients, as in a ring (arXiv:2310.01889).
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, offset: int, scale: float | None) -> Tensor:
        q, k, v = (_dense(x).transpose(1, 2) for x in (query, key, value))
        before, before_sums = _forward(q, k[:, :, :offset], v[:, :, :offset], 0.0, False, scale=scale)
        own, own_sums = _forward(q, k[:, :, offset:], v[:, :, offset:], 0.0, True, scale=scale)
        sums = torch.logaddexp(before_sums, own_sums)
        merged = before * (before_sums - sums).exp_()[..., None]
        merged += own * (own_sums - sums).exp_()[..., None]
        out: Tensor = merged.to(query.dtype)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.offset, ctx.scale = offset, scale
        return out.transpose(1, 2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums = ctx.saved_tensors
        grad, offset = _dense(grad).transpose(1, 2), ctx.offset
        parts = ((slice(None, offset), False), (slice(offset, None), True))
        (q_grad, *before), (own_q_grad, *own) = (
            _backward(grad, q, k[:, :, keys], v[:, :, keys], out, sums, 0.0, causal, scale=ctx.scale)
            for keys, causal in parts
        )
        q_grad += own_q_grad
        k_grad, v_grad = (torch.cat(both, 2) for both in zip(before, own, strict=True))
        return *(one.transpose(1, 2) for one in (q_grad, k_grad, v_grad)), None, None


def _dense(x: Tensor) -> Tensor:
    """A copy with contiguous features, as the kernel reads them."""
    return x if x.stride(-1) == 1 else x.contiguous()
