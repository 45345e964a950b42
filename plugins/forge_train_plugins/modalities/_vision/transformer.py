"""A vision transformer in the form of SigLIP, CLIP and Qwen2.5-VL."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_train import Init
from forge_train_kit.model import LayerNorm, Linear, RMSNorm
from forge_train_kit.model.rope import rotated

from .places import Places
from .positions import LearnedPositions, Rotary, Sines

if TYPE_CHECKING:
    from .._tiles.section import TileSection
    from .section import VisionSection


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "silu": F.silu,
}


class VisionTransformer(nn.Module):
    """Patches to features: projection, positions, and blocks of attention and feed-forward.

    (Dosovitskiy et al. 2020, arXiv:2010.11929; CLIP, arXiv:2103.00020; SigLIP, arXiv:2303.15343; with windows,
    Qwen2.5-VL, arXiv:2502.13923.)
    """

    def __init__(self, config: VisionSection) -> None:
        super().__init__()
        dim = config.dim
        self.pixels = Pixels(config)
        self.frames, self.window, self.full_layers = config.patch_frames, config.window, config.full_layers
        self.patches = Linear(config.patch**2 * 3 * self.frames, dim, bias=config.patch_bias, std=config.std)
        self.class_token = ClassToken(dim, config.std) if config.class_token else None
        self.positions = _positions(config)
        self.rotary = Rotary(dim // config.heads) if config.positions == "rotary" else None
        self.first_norm = _norm(config) if config.first_norm else None
        self.layers = nn.ModuleDict({str(index): VisionBlock(config) for index in range(config.layers)})
        self.norm = _norm(config) if config.final_norm else None

    def forward(self, values: Tensor, where: Places) -> Tensor:
        """Encode `[rows, patches, features]` to `[rows, patches, dim]`.

        Args:
            where: the places of the patches; without `frame`, each row is one frame.
        """
        pixels = self.pixels(values, self.patches.weight.dtype)
        one = pixels.shape[-1] < self.patches.in_features  # an image, which stands for each frame
        x = self.patches(pixels.repeat(1, 1, self.frames) if one else pixels)
        x = x if self.positions is None else x + self.positions(where).to(x.dtype)
        if self.class_token is not None and isinstance(self.positions, LearnedPositions):
            x = torch.cat((self.class_token(self.positions.of_class(x.device)).expand(len(x), 1, -1), x), 1)
        x = x if self.first_norm is None else self.first_norm(x)
        whole = None if where.frame is None else _same(where.frame)
        windows = _same(where.windows(self.window)) if self.window else whole
        turn = None if self.rotary is None else self.rotary(where)
        for index, layer in self.layers.items():
            x = layer(x, whole if int(index) in self.full_layers else windows, turn)
        features: Tensor = x if self.norm is None else self.norm(x)
        return features if self.class_token is None else features[:, 1:]

    @property
    def units(self) -> tuple[str, ...]:
        """Modules to shard and recompute one by one."""
        return tuple(f"layers.{index}" for index in self.layers)

    def flops(self, patches: int, frame: int) -> int:
        """Operations of a forward pass over so many patches, in frames of so many."""
        rows = patches if self.class_token is None else patches + patches // frame
        dim = self.patches.out_features
        weights = sum(p.numel() for p in self.layers.parameters() if p.ndim > 1)
        attention = 4 * rows * (frame + (self.class_token is not None)) * dim * len(self.layers)
        return 2 * (rows * weights + patches * self.patches.weight.numel()) + attention


def _same(numbers: Tensor) -> Tensor:
    """True where two patches have the same number, `[rows, 1, patches, patches]`."""
    return (numbers[:, None] == numbers[..., None])[:, None]


def _norm(config: VisionSection) -> nn.Module:
    return (RMSNorm if config.norm == "rms" else LayerNorm)(config.dim, config.norm_eps)


def _positions(config: VisionSection) -> LearnedPositions | Sines | None:
    """The module that gives what is added to patches."""
    if config.positions == "rotary":
        return None
    if config.positions == "learned":
        return LearnedPositions(config.size // config.patch, config.dim, config.class_token, config.std)
    return Sines(config.dim, axes=1 if config.positions == "sines_1d" else 2)


class Pixels(nn.Module):
    """Values from 0 to 255, normalised: `[…, frames · patch · patch · 3]` in another dtype."""

    scale: Tensor
    shift: Tensor

    def __init__(self, config: VisionSection | TileSection) -> None:
        super().__init__()
        self.mean, self.deviation, self.count = config.mean, config.deviation, config.patch**2
        for name in ("scale", "shift"):
            self.register_buffer(name, torch.empty(3 * self.count), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Fill the factors and summands, in fp32 whatever the model was cast to."""
        mean, deviation = (torch.tensor(one, dtype=torch.float32, device="cpu") for one in (self.mean, self.deviation))
        for name, values in (("scale", 1 / (255 * deviation)), ("shift", -mean / deviation)):
            setattr(self, name, values.repeat(self.count).to(self.scale.device))

    def forward(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        frames = values.float().reshape(*values.shape[:-1], -1, 3 * self.count)
        return (frames * self.scale + self.shift).reshape(values.shape).to(dtype)


class ClassToken(nn.Module):
    """The vector that stands before the patches, at a position of its own."""

    def __init__(self, dim: int, std: float) -> None:
        super().__init__()
        self.weight, self.std = nn.Parameter(torch.empty(dim)), std

    def initial(self, name: str) -> Init:
        return Init("normal", self.std)

    def forward(self, position: Tensor) -> Tensor:
        return self.weight + position


class VisionBlock(nn.Module):
    """Attention and feed-forward, each with a norm before or after it."""

    def __init__(self, config: VisionSection) -> None:
        super().__init__()
        dim, hidden, out = config.dim, config.hidden or 4 * config.dim, config.std / math.sqrt(2 * config.layers)
        self.heads, self.activation = config.heads, ACTIVATIONS[config.activation]
        self.before = config.norm_place == "before"
        self.attention_norm = _norm(config)
        self.q, self.k, self.v = (Linear(dim, dim, bias=config.bias, std=config.std) for _ in range(3))
        self.o = Linear(dim, dim, bias=config.bias, std=out)
        self.feed_forward_norm = _norm(config)
        self.gate = Linear(dim, hidden, bias=config.bias, std=config.std) if config.gated else None
        self.up = Linear(dim, hidden, bias=config.bias, std=config.std)
        self.down = Linear(hidden, dim, bias=config.bias, std=out)

    def forward(self, x: Tensor, mask: Tensor | None, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        """`[rows, patches, dim]` to the same.

        Args:
            mask: `[rows, 1, patches, patches]`, True where a patch sees another; None where all do.
            turn: cos and sin of the angles by which queries and keys are rotated.
        """
        h = self.attention_norm(x) if self.before else x
        q, k, v = (one(h).unflatten(-1, (self.heads, -1)) for one in (self.q, self.k, self.v))
        if turn is not None:
            q, k = rotated(q, *turn), rotated(k, *turn)
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        added: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        x = x + (added if self.before else self.attention_norm(added))
        h = self.feed_forward_norm(x) if self.before else x
        inner = self.activation(self.up(h)) if self.gate is None else self.activation(self.gate(h)) * self.up(h)
        added = self.down(inner)
        found: Tensor = x + (added if self.before else self.feed_forward_norm(added))
        return found
