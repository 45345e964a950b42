"""What a model tells the plugins that build its layers and its head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class Layer:
    """What a chain is told about the layer it builds a module for."""

    index: int
    num_layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    """Width of a dense feed-forward block."""
    norm_eps: float = 1e-6
    bias: bool = False
    """Whether the projections of a feed-forward block have biases."""
    qkv_bias: bool = False
    o_bias: bool = False
    """Whether attention's output projection has one."""
    qk_norm: bool = False
    qk_norm_over: Literal["head", "width"] = "head"
    """Whether queries and keys are normalised head by head, or over the features of all heads together."""
    unit_offset: bool = False
    """Whether RMSNorm multiplies by 1 + its weight."""
    window: int | None = None
    """Positions that a query sees, its own the last of them; None is all."""
    soft_cap: float | None = None
    """Of attention's logits: they become `cap · tanh(logits / cap)`."""
    scale: float | None = None
    """Factor on attention's logits; None is 1/√head_dim."""
    rope: nn.Module | None = None
    """The rotary embedding shared by layers: `rope(x [batch, sequence, heads, head_dim], position_ids) → x`. None in a
    layer without positions."""
    std: float = 0.02
    """Standard deviation of initial weights."""
    output_std: float = 0.02
    """The same for projections that write into the residual stream."""


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """What a model tells the plugin that builds its head."""

    dim: int
    """Features of the hidden states that the head is given."""
    vocabulary: int
    """Number of token ids."""
    std: float = 0.02
    """Standard deviation of initial weights."""
    divisor: float = 1.0
    """What logits are divided by. A head that does so has an attribute `divisor` of this value."""
    soft_cap: float | None = None
    """Logits, once divided, become `cap · tanh(logits / cap)` (Gemma 2, arXiv:2408.00118). A head that does so has an
    attribute `soft_cap` of this value."""
