"""The vision transformer of Llama 3.2 Vision (arXiv:2407.21783, §7.1)."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_train import Init
from forge_train_kit.model import Embedding, LayerNorm, Linear

from .._vision.transformer import ACTIVATIONS, ClassToken, Pixels
from .canvas import arrangements

if TYPE_CHECKING:
    from .section import TileSection

MULTIPLE = 8
"""The vectors of a tile are padded to a multiple of this number. Patches attend to the padding, and to tiles that an
image lacks: the published weights were trained so."""


class TileTransformer(nn.Module):
    """Patches to features: first blocks, then gated ones, all of which see all tiles of an image.

    Positions are learned: of a tile in its arrangement, of a patch in its tile, and of a patch in the whole image.
    """

    def __init__(self, config: TileSection) -> None:
        super().__init__()
        dim, kinds, tiles = config.dim, len(arrangements(config.tiles)) + 1, config.tiles
        self.tiles, self.vectors, self.outputs = tiles, (config.size // config.patch) ** 2 + 1, config.outputs
        self.pixels = Pixels(config)
        self.patches = Linear(config.patch**2 * 3, dim, std=config.std)
        self.class_token = ClassToken(dim, config.std)
        self.first_tiles, self.second_tiles = (TilePositions(config, kinds) for _ in range(2))
        self.positions = Embedding(self.vectors, dim, std=config.std)
        self.image_positions = Embedding(kinds, tiles * self.vectors * dim, std=config.std)
        self.positions_gate = Gate()
        self.first_norm, self.second_norm = LayerNorm(dim), LayerNorm(dim)
        self.layers = _stack(config, config.layers, gated=False)
        self.global_layers = _stack(config, config.global_layers, gated=True)

    def forward(self, values: Tensor, tile: Tensor, there: Tensor, kinds: Tensor) -> Tensor:
        """Encode `[batch, tiles of a row, patches, features]` to `[batch, items, tiles, vectors, width]`.

        Args:
            tile: the tiles of each item, `[batch, items, tiles]`.
            there: the same shape; False for those that it lacks.
            kinds: the number of its arrangement, `[batch, items]`.
        """
        x = self.patches(self.pixels(values, self.patches.weight.dtype))
        rows = torch.arange(len(x), device=x.device)[:, None, None]
        x = x[rows, tile].masked_fill(~there[..., None, None], 0.0)
        x = self.first_tiles(x, kinds)
        token = self.class_token(x.new_zeros(x.shape[-1])).expand(*x.shape[:3], 1, -1)
        x = self.first_norm(self._placed(torch.cat((token, x), 3), kinds))
        x = F.pad(x, (0, 0, 0, -self.vectors % MULTIPLE))
        shape, seen = x.shape, self._seen(there, x.shape[3])
        x = x.view(-1, shape[2] * shape[3], shape[4])
        kept = {}
        for index, layer in enumerate(self.layers.values()):
            x = layer(x, seen)
            if index in self.outputs:
                kept[index] = x
        x = self.second_tiles(self.second_norm(x).view(shape), kinds).view(x.shape)
        for layer in self.global_layers.values():
            x = layer(x, seen)
        if self.outputs:
            x = torch.cat((x, torch.stack([kept[index] for index in self.outputs], -1).flatten(-2)), -1)
        features: Tensor = x.view(*shape[:4], -1)[:, :, :, : self.vectors]
        return features

    def flops(self, patches: int) -> int:
        """Operations of a forward pass over an item of so many patches."""
        dim, blocks = self.patches.out_features, (*self.layers.values(), *self.global_layers.values())
        seen = self.tiles * -(-self.vectors // MULTIPLE) * MULTIPLE
        weights = sum(p.numel() for block in blocks for p in block.parameters() if p.ndim > 1)
        return 2 * (seen * weights + patches * self.patches.weight.numel()) + 4 * seen**2 * dim * len(blocks)

    def _placed(self, x: Tensor, kinds: Tensor) -> Tensor:
        """`[batch, items, tiles, vectors, dim]`, with positions in the tile and in the image."""
        gate = self.positions_gate()
        own = self.positions(torch.arange(self.vectors, device=x.device))
        placed: Tensor = x + (1 - gate) * own + gate * self.image_positions(kinds).view(x.shape)
        return placed

    def _seen(self, there: Tensor, vectors: int) -> Tensor:
        """`[images, 1, positions, positions]`, False between two positions of which neither has a patch or token."""
        some = there.clone()
        some[..., 0] = True  # kernels differ over rows without anything
        full = torch.arange(vectors, device=there.device) < self.vectors
        blank = ~(some[..., None] & full).flatten(0, 1).flatten(1)
        return ~(blank[:, None] & blank[..., None])[:, None]


class TilePositions(nn.Module):
    """Adds a vector to all patches of a tile, which depends on its place and on the arrangement."""

    def __init__(self, config: TileSection, kinds: int) -> None:
        super().__init__()
        self.table, self.gate = Embedding(kinds, config.tiles * config.dim, std=config.std), Gate()

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        """`[batch, items, tiles, patches, dim]` to the same."""
        of_tiles = self.table(kinds).view(*x.shape[:3], 1, x.shape[-1])
        added: Tensor = x + of_tiles * self.gate()
        return added


class Gate(nn.Module):
    """`tanh(weight)`.

    Args:
        start: value of the weight.
    """

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.weight, self.start = nn.Parameter(torch.empty(1)), start

    def initial(self, name: str) -> Init:
        return Init("given", values=partial(_start, self.start)) if self.start else Init("zeros")

    def forward(self) -> Tensor:
        return self.weight.tanh()


class TileBlock(nn.Module):
    """Attention and feed-forward, each with a norm before it and, if wanted, a gate after it."""

    def __init__(self, config: TileSection, *, gated: bool) -> None:
        super().__init__()
        dim, hidden = config.dim, config.hidden or 4 * config.dim
        out = config.std / math.sqrt(2 * (config.layers + config.global_layers))
        self.heads, self.activation = config.heads, ACTIVATIONS[config.activation]
        self.attention_norm = LayerNorm(dim, config.norm_eps)
        self.q, self.k, self.v = (Linear(dim, dim, std=config.std) for _ in range(3))
        self.o = Linear(dim, dim, std=out)
        self.feed_forward_norm = LayerNorm(dim, config.norm_eps)
        self.up = Linear(dim, hidden, bias=True, std=config.std)
        self.down = Linear(hidden, dim, bias=True, std=out)
        self.attention_gate, self.feed_forward_gate = (Gate(math.pi / 4) if gated else None for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """`[images, positions, dim]` to the same; `mask` as for torch's attention."""
        h = self.attention_norm(x)
        q, k, v = (one(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in (self.q, self.k, self.v))
        mixed = self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
        x = x + (mixed if self.attention_gate is None else self.attention_gate() * mixed)
        mixed = self.down(self.activation(self.up(self.feed_forward_norm(x))))
        added: Tensor = x + (mixed if self.feed_forward_gate is None else self.feed_forward_gate() * mixed)
        return added


def _stack(config: TileSection, count: int, *, gated: bool) -> nn.ModuleDict:
    return nn.ModuleDict({str(index): TileBlock(config, gated=gated) for index in range(count)})


def _start(value: float, seed: int) -> Tensor:
    return torch.full((1,), value)
