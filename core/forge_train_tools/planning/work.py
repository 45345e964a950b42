"""Work of a step's kernels: operations, and bytes read and written."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from .watch import Watch

aten = torch.ops.aten
NO_KERNELS = {"c10d", "_c10d_functional", "prim"}
"""Namespaces of collectives, and of questions such as for a tensor's device."""


class Work(Watch):
    """Tells of every kernel: its floating-point operations, the bytes it reads and writes, and whether it is attention.

    Each operation reads its arguments and writes its results, as it does where nothing is fused; a view costs nothing.

    Args:
        tell: called with the three.
    """

    def __init__(self, tell: Callable[[float, int, bool], None]) -> None:
        super().__init__()
        self._tell = tell

    def look(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if _is_kernel(func):
            size = _bytes(args) + _bytes(kwargs) + _bytes(out)
            self._tell(_flops(func, args, kwargs, out), size, "attention" in func._opname)


@cache
def _is_kernel(func: Any) -> bool:
    return not (func.is_view or func.namespace in NO_KERNELS or "empty" in func._opname)


def _bytes(tree: Any) -> int:
    if isinstance(tree, Tensor):
        return tree.numel() * tree.element_size()
    if isinstance(tree, (list, tuple)):
        return sum(_bytes(one) for one in tree)
    return sum(_bytes(one) for one in tree.values()) if isinstance(tree, dict) else 0


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    packet = func.overloadpacket
    if packet in _OWN:
        return _OWN[packet](*args)
    count = flop_registry.get(packet)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=out))


def _attention(query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, causal: bool = False) -> float:
    """Q Kᵀ and P V; half of both where what comes later is masked. Torch's own count takes no fewer key heads."""
    return _scores(query, key, causal) * (query.shape[-1] + value.shape[-1])


def _attention_backward(
    _: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, dropout: float, causal: bool
) -> float:
    """Q Kᵀ once more, and the gradients of P, V, Q and K (arXiv:2307.08691, §3.1)."""
    return _scores(query, key, causal) * (3 * query.shape[-1] + 2 * value.shape[-1])


def _scores(query: Tensor, key: Tensor, causal: bool) -> float:
    """Multiply-adds, as two operations each, per feature."""
    batch, heads, queries, _ = query.shape
    return 2.0 * batch * heads * queries * key.shape[-2] * (0.5 if causal else 1.0)


def _grouped(rows: Tensor, matrices: Tensor, *_: Any) -> float:
    """Every row times one of the matrices, or every group of columns times its rows."""
    return 2.0 * rows.numel() * matrices.shape[-1]


_OWN: dict[Any, Callable[..., float]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten._grouped_mm: _grouped,
}
"""Operations that torch's own registry (2.13) does not count."""
