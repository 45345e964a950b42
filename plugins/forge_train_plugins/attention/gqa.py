"""Grouped-query attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_train import Plugin, hookimpl
from forge_train_kit.capabilities import KernelCapabilities
from forge_train_kit.kernels import kernel_with
from forge_train_kit.layers import Attention, Layer

if TYPE_CHECKING:
    from forge_train import Job


class GQA(Plugin):
    """Attention whose query heads share keys and values in groups (Ainslie et al. 2023, arXiv:2305.13245)."""

    api = (1, 0)
    facts = {"plan.per_unit": True}
    requires = ("attention_kernel",)

    @hookimpl
    def attention(self, layer: Layer, job: Job) -> Attention:
        from forge_train_kit.model import AttentionDropout

        from ._gqa import GroupedQueryAttention

        needs = KernelCapabilities(
            windows=layer.window is not None,
            soft_caps=layer.soft_cap is not None,
            sinks=layer.sinks,
            prefixes=layer.prefix,
            head_dims=(layer.head_dim,),
        )
        rate, name = layer.attention_dropout, f"layers.{layer.index}.attention.weights"
        dropout = AttentionDropout(rate, layer.heads, job, name) if rate else None
        return GroupedQueryAttention(layer, kernel_with(needs, job), dropout)
