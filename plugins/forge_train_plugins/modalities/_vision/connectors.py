"""Connectors: from the features of patches to vectors of the model's width."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_train import Init
from forge_train_kit.model import LayerNorm, Linear

from .places import Places
from .positions import Sines

if TYPE_CHECKING:
    from .section import VisionSection


def connector(config: VisionSection, dim: int, *, clips: bool) -> Projection | Gated | Pooling | Resampler:
    """The connector of a section, to vectors of this width."""
    if config.connector == "resampler":
        return Resampler(config, dim, clips=clips)
    if config.connector == "gated":
        return Gated(config, dim, clips=clips)
    return (Pooling if config.connector == "pooling" else Projection)(config, dim, clips=clips)


class _Connector(nn.Module):
    """Adds sines of its frame's number to each patch of a clip: attention to the features would not tell their order,
    as in Flamingo (arXiv:2204.14198, §2.1)."""

    def __init__(self, config: VisionSection, *, clips: bool) -> None:
        super().__init__()
        self.time = Sines(config.dim, axes=1) if clips else None

    def timed(self, features: Tensor, where: Callable[[], Places]) -> Tensor:
        return features if self.time is None else features + self.time.of(where().time).to(features.dtype)


class Projection(_Connector):
    """The features of a block of patches, side by side, to one vector: one projection, or two with GELU in between."""

    def __init__(self, config: VisionSection, dim: int, *, clips: bool) -> None:
        super().__init__(config, clips=clips)
        self.block = config.merge**2
        inner = config.connector_hidden or dim
        self.first = Linear(config.dim * self.block, inner, bias=True, std=config.std)
        self.second = Linear(inner, dim, bias=True, std=config.std) if config.connector == "mlp" else None

    def forward(self, features: Tensor, where: Callable[[], Places]) -> Tensor:
        """`[batch, patches, width]` to `[batch, vectors, dim]`."""
        batch, patches, width = features.shape
        features = self.timed(features, where)
        x: Tensor = self.first(features.reshape(batch, patches // self.block, self.block * width))
        return x if self.second is None else self.second(F.gelu(x))

    def flops(self, patches: int) -> int:
        """Operations of a forward pass over an item of so many patches."""
        return 2 * patches // self.block * sum(p.numel() for p in self.parameters() if p.ndim > 1)


class Gated(_Connector):
    """The features of a block of patches, side by side, to one vector: a projection, LayerNorm and GELU, then SwiGLU,
    as in CogVLM (arXiv:2311.03079). No projection has a bias."""

    def __init__(self, config: VisionSection, dim: int, *, clips: bool) -> None:
        super().__init__(config, clips=clips)
        self.block, inner = config.merge**2, config.connector_hidden or dim
        self.first = Linear(config.dim * self.block, dim, bias=False, std=config.std)
        self.norm = LayerNorm(dim, 1e-5)
        self.gate, self.up = (Linear(dim, inner, bias=False, std=config.std) for _ in range(2))
        self.down = Linear(inner, dim, bias=False, std=config.std)

    def forward(self, features: Tensor, where: Callable[[], Places]) -> Tensor:
        """`[batch, patches, width]` to `[batch, vectors, dim]`."""
        batch, patches, width = features.shape
        features = self.timed(features, where)
        x = F.gelu(self.norm(self.first(features.reshape(batch, patches // self.block, self.block * width))))
        vectors: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return vectors

    def flops(self, patches: int) -> int:
        """Operations of a forward pass over an item of so many patches."""
        return 2 * patches // self.block * sum(p.numel() for p in self.parameters() if p.ndim > 1)


class _Attention(nn.Module):
    """Attention of few queries to the features of patches."""

    def __init__(self, config: VisionSection) -> None:
        super().__init__()
        self.heads, self.dim = config.heads, config.dim
        self.q, self.k, self.v, self.o = (
            Linear(config.dim, config.dim, bias=config.bias, std=config.std) for _ in range(4)
        )

    def forward(self, queries: Tensor, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """`[rows, queries, dim]` and `[rows, patches, dim]` to the first; `mask` as for torch's attention."""
        given = ((self.q, queries), (self.k, features), (self.v, features))
        q, k, v = (project(one).unflatten(-1, (self.heads, -1)).transpose(1, 2) for project, one in given)
        mixed: Tensor = self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
        return mixed

    def flops(self, queries: int, patches: int, seen: int) -> int:
        """Operations of a forward pass, where each query sees so many of the patches."""
        return 4 * (queries + patches) * self.dim**2 + 4 * queries * seen * self.dim


class Pooling(_Connector):
    """A block of patches to one vector: their mean attends to them, as in Molmo (arXiv:2409.17146)."""

    def __init__(self, config: VisionSection, dim: int, *, clips: bool) -> None:
        super().__init__(config, clips=clips)
        self.block = config.merge**2
        self.attention = _Attention(config)
        self.first = Linear(config.dim, dim, bias=True, std=config.std)
        self.second = Linear(dim, dim, bias=True, std=config.std)

    def forward(self, features: Tensor, where: Callable[[], Places]) -> Tensor:
        """`[batch, patches, width]` to `[batch, vectors, dim]`."""
        blocks = self.timed(features, where).reshape(-1, self.block, features.shape[-1])
        pooled = self.attention(blocks.mean(1, keepdim=True), blocks)
        vectors: Tensor = self.second(F.gelu(self.first(pooled)))
        return vectors.reshape(len(features), -1, vectors.shape[-1])

    def flops(self, patches: int) -> int:
        """Operations of a forward pass over an item of so many patches."""
        projections = self.first.weight.numel() + self.second.weight.numel()
        vectors = patches // self.block
        return self.attention.flops(vectors, patches, self.block) + 2 * vectors * projections


class Queries(nn.Module):
    """Learned vectors, `[queries, dim]`."""

    def __init__(self, count: int, dim: int, std: float) -> None:
        super().__init__()
        self.weight, self.std = nn.Parameter(torch.empty(count, dim)), std

    def initial(self, name: str) -> Init:
        return Init("normal", self.std)

    def forward(self) -> Tensor:
        return self.weight


class Resampler(_Connector):
    """An item of any size to as many vectors as there are learned queries, which attend to its patches, as in Qwen-VL
    (arXiv:2308.12966; the Perceiver, arXiv:2103.03206)."""

    def __init__(self, config: VisionSection, dim: int, *, clips: bool) -> None:
        super().__init__(config, clips=clips)
        self.queries = Queries(config.queries, config.dim, config.std)
        self.query_norm, self.norm = LayerNorm(config.dim, config.norm_eps), LayerNorm(config.dim, config.norm_eps)
        self.attention = _Attention(config)
        self.first = Linear(config.dim, dim, bias=True, std=config.std)
        self.second = Linear(dim, dim, bias=True, std=config.std)

    def forward(self, features: Tensor, where: Callable[[], Places]) -> Tensor:
        """`[batch, patches, width]` to `[batch, items · queries, dim]`."""
        place, asked, normed = where(), self.query_norm(self.queries()), self.timed(self.norm(features), where)
        queries = asked.repeat(place.items, 1).expand(len(features), -1, -1)
        number = torch.arange(place.items, device=features.device)[:, None]
        own = place.item[:, None] == number  # [batch, items, patches]
        own = own | ~own.any(-1, keepdim=True)  # of an item that a row lacks: kernels differ over nothing
        seen = own.repeat_interleave(len(asked), 1)[:, None]
        vectors: Tensor = self.second(F.gelu(self.first(self.attention(queries, normed, seen))))
        return vectors

    def flops(self, patches: int) -> int:
        """Operations of a forward pass over an item of so many patches."""
        projections, count = self.first.weight.numel() + self.second.weight.numel(), len(self.queries.weight)
        return self.attention.flops(count, patches, patches) + 2 * count * projections
