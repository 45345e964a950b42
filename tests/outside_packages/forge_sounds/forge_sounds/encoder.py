"""The encoder of sounds: a transformer over the frames of each."""

from __future__ import annotations

import torch
from torch import nn

from forge_train_kit.model import LayerNorm, Linear


class Encoder(nn.Module):
    """`values [batch, frames, bands]` and `grids [batch, sounds, 3]` → a vector of the model's width for each frame."""

    def __init__(self, options, dim):
        super().__init__()
        self.bands = Linear(options.bands, options.dim)
        self.blocks = nn.ModuleList(Block(options.dim, options.heads) for _ in range(options.layers))
        self.norm, self.out = LayerNorm(options.dim), Linear(options.dim, dim)

    def forward(self, values, grids):
        x = self.bands(values.to(self.bands.weight.dtype))
        owner, time = sounds_of(grids, x.shape[1])
        x = x + sines(time, x.shape[-1]).to(x.dtype)
        mask = (owner[:, :, None] == owner[:, None, :])[:, None]
        for block in self.blocks:
            x = block(x, mask)
        return self.out(self.norm(x))


class Block(nn.Module):
    """Attention among the frames of a sound, then a feed-forward block."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.first, self.qkv, self.out = LayerNorm(dim), Linear(dim, 3 * dim), Linear(dim, dim)
        self.second, self.inner, self.outer = LayerNorm(dim), Linear(dim, 4 * dim), Linear(4 * dim, dim)

    def forward(self, x, mask):
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, -1)
        )
        seen = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.outer(nn.functional.gelu(self.inner(self.second(x))))


def sounds_of(grids, frames):
    """Which sound of its row each frame belongs to, and which of its frames it is; padding is one more sound."""
    ends = grids.prod(-1).cumsum(-1)
    here = torch.arange(frames, device=grids.device)
    owner = (here[:, None] >= ends[:, None, :]).sum(-1)
    starts = nn.functional.pad(ends, (1, 0)).gather(1, owner)
    return owner, here - starts


def sines(time, dim):
    """Sines and cosines of a time, `[batch, frames, dim]`."""
    rates = 10000.0 ** (-torch.arange(0, dim, 2, device=time.device) / dim)
    angles = time[..., None] * rates
    return torch.cat((angles.sin(), angles.cos()), -1)
