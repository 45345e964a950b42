"""Rotary position embeddings whose frequencies depend on how long a sequence is."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .rope import powers, rotated


class LengthRoPE(nn.Module):
    """`RoPE` whose frequencies depend on the length of each sequence: its largest position + 1.

    A row of packed documents is as long as its longest document. `transformers` uses the length of the longest row in a
    batch. Here each row uses its own, so that its numbers do not depend on other rows. cos and sin are computed at each
    call, without waiting for the device.

    Args:
        head_dim: number of rotated features, the first of each head; even.
        length: positions 0…length − 1 can be rotated.
        theta: the base of the frequencies.
        original_length: the context of pre-training, in tokens; all sequences up to this length have the same
            frequencies.
    """

    table: Tensor
    attention_factor = 1.0
    """Multiplies cos and sin."""

    def __init__(self, head_dim: int, *, length: int, theta: float, original_length: int) -> None:
        super().__init__()
        self.head_dim, self.length, self.theta, self.original_length = head_dim, length, theta, original_length
        self.register_buffer("table", torch.empty(0), persistent=False)

    def frequencies(self, length: Tensor) -> Tensor:
        """`[…, 1]` lengths → `[…, head_dim / 2]` fp32; each scaling below has its own."""
        raise NotImplementedError  # no model uses this base class itself

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Rotate `x [batch, sequence, heads, head_dim]`; `position_ids [batch, sequence]` int64, 0, 1, … by default.

        Raises:
            ValueError: if the sequence is longer than `length`.
        """
        if position_ids is None:
            if x.shape[1] > self.length:
                raise ValueError(f"RoPE was made for {self.length} positions; the sequence has {x.shape[1]}.")
            position_ids = torch.arange(x.shape[1], device=x.device)[None]
        frequencies = self.frequencies(position_ids.amax(1, keepdim=True) + 1)
        angles = (position_ids[..., None].float() * frequencies[:, None]).unsqueeze(-2)
        return rotated(x, angles.cos() * self.attention_factor, angles.sin() * self.attention_factor)

    def extra_repr(self) -> str:
        return f"{self.head_dim}, length={self.length}, theta={self.theta}, original_length={self.original_length}"


class LongRoPE(LengthRoPE):
    """LongRoPE: one list of factors for sequences within the original context, another for longer ones (Ding et al.
    2024, arXiv:2402.13753), as in Phi-3.

    Args:
        short: each frequency is divided by its factor, in sequences of at most `original_length` tokens.
        long: the same for longer ones.
        attention_factor: multiplies cos and sin; 0 means √(1 + ln(length / original_length) / ln(original_length)).
    """

    def __init__(
        self,
        head_dim: int,
        *,
        length: int,
        theta: float,
        original_length: int,
        short: Sequence[float],
        long: Sequence[float],
        attention_factor: float = 0.0,
    ) -> None:
        super().__init__(head_dim, length=length, theta=theta, original_length=original_length)
        self.short, self.long = tuple(short), tuple(long)
        self.attention_factor = attention_factor or long_attention_factor(length / original_length, original_length)
        self.table = torch.empty(2, head_dim // 2)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Both sets of frequencies, in fp32 whatever the model was cast to."""
        if self.table.device.type != "meta":
            factors = torch.tensor([self.short, self.long], device="cpu")
            self.table = (1.0 / (factors * powers(self.theta, self.head_dim))).to(self.table.device)

    def frequencies(self, length: Tensor) -> Tensor:
        return torch.where(length > self.original_length, self.table[1], self.table[0])


class DynamicRoPE(LengthRoPE):
    """“Dynamic NTK”: once a sequence is longer than the original context, the base grows with it, so that the slowest
    frequency is stretched as `linear` would stretch it (described in arXiv:2309.00071, §3.3).

    Args:
        factor: how fast the base grows.
    """

    def __init__(self, head_dim: int, *, length: int, theta: float, original_length: int, factor: float) -> None:
        super().__init__(head_dim, length=length, theta=theta, original_length=original_length)
        self.factor = factor
        self.table = torch.empty(head_dim // 2)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """The exponents of the base."""
        if (device := self.table.device).type != "meta":
            self.table = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device) / self.head_dim

    def frequencies(self, length: Tensor) -> Tensor:
        longer = self.factor * length.clamp(min=self.original_length) / self.original_length - (self.factor - 1)
        base: Tensor = self.theta * longer ** (self.head_dim / (self.head_dim - 2))
        return 1.0 / base**self.table


def long_attention_factor(factor: float, original_length: int) -> float:
    """LongRoPE's factor on cos and sin for sequences `factor` times as long."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_length))
