"""A layer in which tokens attend to items."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_train import Init
from forge_train_kit.layers import Layer
from forge_train_kit.model import Linear, RMSNorm, TensorStyle

if TYPE_CHECKING:
    from .kept import Kept, KeptRows, Pair


class Attention(nn.Module):
    """Attention to the features of items, with normed queries and keys, and without positions.

    The numbers of heads are read from the projections' outputs, so that each rank may hold some of the heads.
    """

    def __init__(self, layer: Layer, index: int) -> None:
        super().__init__()
        width, kv_width = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
        self.index, self.head_dim, self.width = index, layer.head_dim, width
        self.q = Linear(layer.dim, width, std=layer.std)
        self.k = Linear(layer.dim, kv_width, std=layer.std)
        self.v = Linear(layer.dim, kv_width, std=layer.std)
        self.o = Linear(width, layer.dim, std=layer.output_std)
        self.q_norm, self.k_norm = (RMSNorm(layer.head_dim, layer.norm_eps) for _ in range(2))

    def forward(self, x: Tensor, features: Tensor, mask: Tensor, kept: Kept | KeptRows | None = None) -> Tensor:
        """`[batch, sequence, dim]` → the same; `features`, `mask`: see `Items`."""
        query = self.q_norm(self._heads(self.q(x)))
        key, value = self._pair(features.to(x.dtype), kept)
        group = query.shape[1] // key.shape[1]
        if group > 1:  # no fused kernel of CUDA takes a mask and fewer heads of keys (torch 2.13)
            key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask.to(query.dtype))
        mixed: Tensor = self.o(found.transpose(1, 2).flatten(2))
        return mixed

    def _pair(self, features: Tensor, kept: Kept | KeptRows | None) -> Pair:
        def made() -> Pair:
            return self.k_norm(self._heads(self.k(features))), self._heads(self.v(features))

        return made() if kept is None else kept.pair(self.index, made)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)


class FeedForward(nn.Module):
    """`down(silu(gate(x)) · up(x))`."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.gate = Linear(layer.dim, layer.ffn_dim, std=layer.std)
        self.up = Linear(layer.dim, layer.ffn_dim, std=layer.std)
        self.down = Linear(layer.ffn_dim, layer.dim, std=layer.output_std)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Gate(nn.Module):
    """`tanh(weight) · x`, and nothing for tokens that see no item.

    Args:
        start: value of the weight.
    """

    def __init__(self, start: float) -> None:
        super().__init__()
        self.weight, self.start = nn.Parameter(torch.empty(1)), start
        self.sequence_piece = (0, 1)
        """Index of this rank's piece of each sequence, and number of pieces; set by tensor parallelism."""

    def initial(self, name: str) -> Init:
        return Init("given", values=partial(_start, self.start)) if self.start else Init("zeros")

    def forward(self, x: Tensor, sees: Tensor) -> Tensor:
        """`[batch, sequence, dim]` → the same; `sees`: `[batch, whole sequence]`."""
        at, pieces = self.sequence_piece
        if pieces > 1:
            each = -(-sees.shape[1] // pieces)
            sees = F.pad(sees, (0, each * pieces - sees.shape[1])).narrow(1, at * each, each)
        return torch.where(sees[..., None], x, 0) * self.weight.tanh()


class CrossLayer(nn.Module):
    """Gated attention to items and a gated feed-forward block, in the form of Llama 3.2 Vision (arXiv:2407.21783).

    Args:
        layer: sizes of the model's layers.
        index: the layer that follows.
        gate: value at which the gates start.
    """

    def __init__(self, layer: Layer, index: int, gate: float) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(layer.dim, layer.norm_eps)
        self.attention = Attention(layer, index)
        self.attention_gate = Gate(gate)
        self.feed_forward_norm = RMSNorm(layer.dim, layer.norm_eps)
        self.feed_forward = FeedForward(layer)
        self.feed_forward_gate = Gate(gate)

    def forward(
        self,
        hidden: Tensor,
        *,
        features: Tensor | None = None,
        mask: Tensor | None = None,
        sees: Tensor | None = None,
        kept: Kept | KeptRows | None = None,
        **_: Any,
    ) -> Tensor:
        """`[batch, sequence, dim]` → the same; see `Items` for the others. A batch without items passes unchanged."""
        if features is None or mask is None or sees is None:
            return hidden
        mixed = self.attention(self.attention_norm(hidden), features, mask, kept)
        hidden = hidden + self.attention_gate(mixed, sees)
        mixed = self.feed_forward(self.feed_forward_norm(hidden))
        out: Tensor = hidden + self.feed_forward_gate(mixed, sees)
        return out

    def tensor_plan(self) -> dict[str, TensorStyle]:
        """Heads and the feed-forward block's features are split; what lies between works on each token alone."""
        plan: dict[str, TensorStyle] = {"attention": "gather", "feed_forward": "gather"}
        plan |= {f"attention.{one}": "colwise" for one in ("q", "k", "v")}
        plan |= {f"attention.{one}": "heads" for one in ("q_norm", "k_norm")}
        plan |= {f"feed_forward.{one}": "colwise" for one in ("gate", "up")}
        plan |= {"attention.o": "rowwise", "feed_forward.down": "rowwise"}
        beside = ("attention_norm", "attention_gate", "feed_forward_norm", "feed_forward_gate")
        return plan | dict.fromkeys(beside, "sequence")

    def weights(self) -> int:
        """Elements of the matrices that each token is multiplied by; keys and values are of items."""
        return sum(one.numel() for one in self.parameters() if one.ndim > 1) - self.weights_of_items()

    def weights_of_items(self) -> int:
        """Elements of the matrices that each feature vector is multiplied by."""
        return self.attention.k.weight.numel() + self.attention.v.weight.numel()


def _start(value: float, seed: int) -> Tensor:
    return torch.full((1,), value)
