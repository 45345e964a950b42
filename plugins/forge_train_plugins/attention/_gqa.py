"""The module of the `gqa` plugin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from forge_train import Init
from forge_train_kit.layers import AttentionKernel, AttentionOptions, Layer
from forge_train_kit.model import (
    AttentionDropout,
    KVCache,
    Linear,
    OffsetRMSNorm,
    RMSNorm,
    SlotCache,
    Slots,
    TensorStyle,
    flops_per_token,
)


class Sinks(nn.Module):
    """A logit for each head (as in GPT-OSS; compare arXiv:2309.17453)."""

    heads_piece = (0, 1)
    """This rank's heads: index and number of pieces."""

    def __init__(self, heads: int, std: float) -> None:
        super().__init__()
        self.weight, self.std = nn.Parameter(torch.empty(heads)), std

    def initial(self, name: str) -> Init:
        return Init("normal", self.std)

    def forward(self) -> Tensor:
        """The logits of this rank's heads, `[heads]`."""
        at, pieces = self.heads_piece
        return self.weight if pieces == 1 else self.weight.chunk(pieces)[at]


class Projections(nn.Module):
    """The part of attention that works on each token alone.

    The numbers of heads are read from the projections' outputs, so that each rank may hold some of the heads.
    """

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        width, kv_width = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
        self.layer = replace(layer, index=0, num_layers=1, window=None, rope=None)  # the same in layers that are alike
        self.head_dim = layer.head_dim
        self.q = Linear(layer.dim, width, bias=layer.qkv_bias, std=layer.std)
        self.k = Linear(layer.dim, kv_width, bias=layer.qkv_bias, std=layer.std)
        self.v = Linear(layer.dim, kv_width, bias=layer.qkv_bias, std=layer.std)
        self.o = Linear(width, layer.dim, bias=layer.o_bias, std=layer.output_std)
        norm = OffsetRMSNorm if layer.unit_offset else RMSNorm
        self.norms_width = layer.qk_norm and layer.qk_norm_over == "width"
        sizes = (width, kv_width) if self.norms_width else (layer.head_dim, layer.head_dim)
        self.q_norm = norm(sizes[0], layer.norm_eps) if layer.qk_norm else None
        self.k_norm = norm(sizes[1], layer.norm_eps) if layer.qk_norm else None

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[batch, sequence, dim]` → queries, keys and values `[batch, sequence, heads, head_dim]`."""
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.q_norm is not None and self.k_norm is not None and self.norms_width:
            q, k = self.q_norm(q), self.k_norm(k)
        q_BTHD, k_BTKD, v_BTKD = self._split_heads(q), self._split_heads(k), self._split_heads(v)
        if self.q_norm is not None and self.k_norm is not None and not self.norms_width:
            q_BTHD, k_BTKD = self.q_norm(q_BTHD), self.k_norm(k_BTKD)
        return q_BTHD, k_BTKD, v_BTKD

    def output(self, out_BTHD: Tensor) -> Tensor:
        """Results of the heads, `[batch, sequence, heads, head_dim]` → `[batch, sequence, dim]`."""
        mixed: Tensor = self.o(out_BTHD.flatten(2))
        return mixed

    def another(self) -> Projections:
        """The same with weights of its own."""
        return Projections(self.layer)

    def _split_heads(self, x: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        return x.view(batch, sequence, x.shape[-1] // self.head_dim, self.head_dim)


class GroupedQueryAttention(Projections):
    """Attention in which heads // kv_heads neighbouring query heads share a key and a value head."""

    def __init__(self, layer: Layer, kernel: AttentionKernel, dropout: AttentionDropout | None = None) -> None:
        super().__init__(layer)
        self.heads, self.kv_heads = layer.heads, layer.kv_heads
        self.rope = layer.rope
        self.sinks, self.sink = layer.sinks, Sinks(layer.heads, layer.std) if layer.sinks else None
        self.window, self.soft_cap, self.scale = layer.window, layer.soft_cap, layer.scale
        self.prefix = layer.prefix
        self.attention_dropout, self.dropout = layer.attention_dropout, dropout
        self.kernel = kernel
        self.width = layer.heads * layer.head_dim
        self.weights = 2 * layer.dim * (layer.heads + layer.kv_heads) * layer.head_dim

    def forward(
        self,
        x: Tensor,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: KVCache | SlotCache | None = None,
        prefix_ends: Tensor | None = None,
    ) -> Tensor:
        """`[batch, sequence, dim]` → the same; `position_ids`, `document_ids`, `prefix_ends`: `[batch, sequence]` int64
        or None."""
        q_BTHD, k_BTKD, v_BTKD = self.project(x)
        if self.rope is not None:
            q_BTHD, k_BTKD = self._rotated(self.rope, q_BTHD, k_BTKD, position_ids)
        options = AttentionOptions(
            scale=self.scale,
            document_ids=document_ids,
            window=self.window,
            dropout=None if self.dropout is None else self.dropout(x),
            soft_cap=self.soft_cap,
            sinks=None if self.sink is None else self.sink(),
            prefix_ends=prefix_ends,
        )
        if cache is None:
            out_BTHD = self.kernel(q_BTHD, k_BTKD, v_BTKD, options)
        else:
            out_BTHD = cache.attend(self.kernel, q_BTHD, k_BTKD, v_BTKD, options)
        return self.output(out_BTHD)

    def new_cache(self, batch: int, length: int) -> KVCache:
        return KVCache(batch, length)

    def new_slots(self, slots: Slots) -> SlotCache:
        return SlotCache(slots, self.window)

    def flops_per_token(self, sequence: int) -> int:
        return flops_per_token(sequence, weights=self.weights, width=self.width, window=self.window)

    def tensor_plan(self) -> dict[str, TensorStyle]:
        plan: dict[str, TensorStyle] = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}
        if self.q_norm is not None:
            style: TensorStyle = "features" if self.norms_width else "heads"
            plan |= {"q_norm": style, "k_norm": style}
        if self.sink is not None:
            plan["sink"] = "heads"
        if self.dropout is not None:
            plan["dropout"] = "heads"
        return plan

    def _rotated(
        self, rope: nn.Module, q_BTHD: Tensor, k_BTKD: Tensor, position_ids: Tensor | None
    ) -> Sequence[Tensor]:
        """Both at their positions; of a single token in one call, whose operations cost more than their numbers."""
        if q_BTHD.shape[1] > 1:
            return rope(q_BTHD, position_ids), rope(k_BTKD, position_ids)
        both: Tensor = rope(torch.cat((q_BTHD, k_BTKD), 2), position_ids)
        return torch.split(both, [q_BTHD.shape[2], k_BTKD.shape[2]], dim=2)
