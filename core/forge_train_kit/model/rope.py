"""Rotary position embedding, and scalings that stretch it to longer sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from .spans import PerBatch


class Scaling(Protocol):
    """A change of the rotation frequencies; `RoPE` takes any object of this shape."""

    @property
    def attention_factor(self) -> float:
        """Multiplies cos and sin, and so the attention logits by its square."""
        ...

    def frequencies(self, frequencies: Tensor, theta: float) -> Tensor:
        """New frequencies from the original ones, both `[head_dim / 2]` fp32."""
        ...


class RoPE(nn.Module):
    """Rotates pairs of features by an angle that grows with the position (Su et al. 2021, arXiv:2104.09864, eq. 34).

    Feature i is paired with feature i + head_dim / 2 (“rotate half”, the layout of Llama's and Qwen3's weights in
    Hugging Face format), and turned by `position · theta^(−2i / head_dim)`.

    Frequencies, with each scaling, equal those of `transformers` to the bit: at position 100,000, a relative error of
    6e-8 would rotate the fastest feature by 0.006.

    All layers share two tables of cos and sin for all positions, `[length, head_dim / 2]` fp32, so a training step
    computes neither.

    Args:
        head_dim: number of rotated features, the first of each head; even. The others are not rotated (“partial
            rotary”).
        length: positions 0…length − 1 can be rotated.
        theta: the base of the frequencies.
        scaling: stretches them.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, *, length: int, theta: float = 10_000.0, scaling: Scaling | None = None) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.length = length
        self.theta = theta
        self.scaling = scaling
        self._shared: PerBatch[tuple[Tensor, Tensor]] = PerBatch()
        self.register_buffer("cos", torch.empty(length, head_dim // 2), persistent=False)
        self.register_buffer("sin", torch.empty(length, head_dim // 2), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Fill the tables on the device they are on, in fp32 whatever the model was cast to."""
        device = self.cos.device
        if device.type == "meta":
            return  # nothing to fill, and a power of a meta tensor makes torch (2.13) import its compiler: 0.6 s
        frequencies = 1.0 / powers(self.theta, self.head_dim)
        factor = 1.0
        if self.scaling is not None:
            frequencies = self.scaling.frequencies(frequencies, self.theta)
            factor = self.scaling.attention_factor
        angles = torch.arange(self.length, dtype=torch.float32, device=device)[:, None] * frequencies.to(device)
        self.cos, self.sin = angles.cos() * factor, angles.sin() * factor

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Rotate `x [batch, sequence, heads, head_dim]`; `position_ids [batch, sequence]` int64, 0, 1, … by default.

        Raises:
            ValueError: if the sequence is longer than the tables.
        """
        if position_ids is None:
            if x.shape[1] > self.length:
                raise ValueError(f"RoPE was made for {self.length} positions; the sequence has {x.shape[1]}.")
            cos, sin = self.cos[: x.shape[1], None], self.sin[: x.shape[1], None]
        elif torch.is_grad_enabled() or x.shape[-1] > self.head_dim:
            cos, sin = (one.unsqueeze(-2) for one in self._at(position_ids))
        else:
            wide_cos, wide_sin = self._shared(position_ids, id(self.cos), lambda: self._wide(position_ids))
            turned = x.float() * wide_cos
            turned += x.float().roll(self.head_dim // 2, -1) * wide_sin
            return turned.to(x.dtype)
        return rotated(x, cos, sin)

    def _wide(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin for all features, with the signs of the formula: the same numbers, in fewer operations."""
        cos, sin = self._at(position_ids)
        return torch.cat((cos, cos), -1).unsqueeze(-2), torch.cat((-sin, sin), -1).unsqueeze(-2)

    def _at(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of positions `[…]`, `[…, head_dim / 2]` each."""
        return self.cos[position_ids], self.sin[position_ids]

    def extra_repr(self) -> str:
        return f"{self.head_dim}, length={self.length}, theta={self.theta}, scaling={self.scaling}"


class SectionedRoPE(RoPE):
    """`RoPE` whose pairs of features follow different axes of a position (M-RoPE, arXiv:2409.12191, §2.1).

    Of positions `[batch, sequence, 3]`, such as `ItemPositions` gives, the first section of pairs is turned by the
    first number, and so on. Positions `[batch, sequence]` turn all pairs, as in `RoPE`.

    Args:
        head_dim: number of rotated features.
        sections: pairs of features for each axis; head_dim / 2 in all.
        length: positions 0…length − 1 can be rotated.
        theta: the base of the frequencies.
        scaling: stretches them.
    """

    def __init__(
        self,
        head_dim: int,
        sections: Sequence[int],
        *,
        length: int,
        theta: float = 10_000.0,
        scaling: Scaling | None = None,
    ) -> None:
        super().__init__(head_dim, length=length, theta=theta, scaling=scaling)
        self.sections = list(sections)

    def _at(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        if position_ids.dim() == 2:
            return super()._at(position_ids)
        each = [position_ids[..., axis] for axis in range(len(self.sections))]
        parts = ([*zip(torch.split(one, self.sections, -1), each, strict=True)] for one in (self.cos, self.sin))
        cos, sin = (torch.cat([part[ids] for part, ids in one], -1) for one in parts)
        return cos, sin


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first features of `x [batch, sequence, heads, head_dim]` by angles with cos and sin `[…, half]`."""
    features = 2 * cos.shape[-1]
    if x.shape[-1] > features:
        turned, rest = torch.split(x, [features, x.shape[-1] - features], dim=-1)
        return torch.cat((_turn(turned, cos, sin), rest), dim=-1)
    return _turn(x, cos, sin)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def powers(theta: float, head_dim: int) -> Tensor:
    """`theta^(2i / head_dim)`. Always on the CPU, because other devices round powers differently."""
    return theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All positions divided by `factor` (Chen et al. 2023, arXiv:2306.15595)."""

    factor: float

    @property
    def attention_factor(self) -> float:
        return 1.0

    def frequencies(self, frequencies: Tensor, theta: float) -> Tensor:
        return frequencies / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Divides slow frequencies by `factor`, keeps fast ones, and blends linearly in between (Llama 3.1,
    arXiv:2407.21783).

    Args:
        factor: divisor of slow frequencies.
        original_length: the context of pre-training, in tokens.
        low: slow features turn fewer than `low` times within it.
        high: fast features turn more than `high` times.
    """

    factor: float
    original_length: int
    low: float = 1.0
    high: float = 4.0

    @property
    def attention_factor(self) -> float:
        return 1.0

    def frequencies(self, frequencies: Tensor, theta: float) -> Tensor:
        turns = self.original_length / (2 * math.pi / frequencies)
        keep = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return keep * frequencies + (1 - keep) * frequencies / self.factor


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN: “NTK-by-parts” frequencies and a temperature (Peng et al. 2023, arXiv:2309.00071, §3.2 and §3.4).

    Args:
        factor: divisor of slow frequencies.
        original_length: the context of pre-training, in tokens.
        slow: features that turn fewer times within it are divided by `factor` (β_slow, the paper's α).
        fast: features that turn more times are kept (β_fast, the paper's β).
        temperature: the attention factor √(1/t); 0 means the paper's 0.1 ln(factor) + 1.
        truncate: round the two bounds between slow and fast features outwards to whole features.
    """

    factor: float
    original_length: int
    slow: float = 1.0
    fast: float = 32.0
    temperature: float = 0.0
    truncate: bool = True

    @property
    def attention_factor(self) -> float:
        return self.temperature or 0.1 * math.log(max(self.factor, 1.0)) + 1.0

    def frequencies(self, frequencies: Tensor, theta: float) -> Tensor:
        count = frequencies.numel()
        first, last = (self._feature(turns, count, theta) for turns in (self.fast, self.slow))
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * count - 1)
        index = torch.arange(count, dtype=torch.float32, device=frequencies.device)
        # Published models were trained with the range widened if both bounds fall on one feature.
        width = (last if last != first else last + 0.001) - first
        keep = 1 - ((index - first) / width).clamp(0, 1)
        slow = 1.0 / (self.factor * powers(theta, 2 * count).to(frequencies.device))
        return (1 - keep) * slow + keep * frequencies

    def _feature(self, turns: float, count: int, theta: float) -> float:
        """The (fractional) feature that turns this often within the original length: eq. 17 solved for the feature."""
        return count * math.log(self.original_length / (turns * 2 * math.pi)) / math.log(theta)
