"""Building blocks of models: initial values of parameters, and specs that describe a layer or a head to its plugin.

Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Init:
    """Initial values of a parameter.

    Args:
        kind: `normal` (mean 0), `uniform` (mean 0), `ones`, `zeros`, or `given`.
        std: standard deviation of the first two kinds.
        values: for `given`: maps the run's seed to the full tensor on the CPU, the same on every rank.
    """

    kind: Literal["normal", "uniform", "ones", "zeros", "given"]
    std: float = 0.02
    values: Callable[[int], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """Spec of a layer, passed to a chain that builds one of its modules."""

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
    """True if the projections of a feed-forward block have biases."""
    qkv_bias: bool = False
    o_bias: bool = False
    """True if attention's output projection has a bias."""
    qk_norm: bool = False
    qk_norm_over: Literal["head", "width"] = "head"
    """Scope of the normalisation of queries and keys: each head, or the features of all heads together."""
    unit_offset: bool = False
    """True if RMSNorm multiplies by 1 + its weight."""
    window: int | None = None
    """Number of positions that a query sees: its own and those before it; None is all."""
    soft_cap: float | None = None
    """Attention's logits become `cap · tanh(logits / cap)`; None is no cap."""
    scale: float | None = None
    """Factor on attention's logits; None is 1/√head_dim."""
    rope: nn.Module | None = None
    """The rotary embedding shared by layers: `rope(x [batch, sequence, heads, head_dim], position_ids) → x`. None in a
    layer without positions."""
    std: float = 0.02
    """Standard deviation of initial weights."""
    output_std: float = 0.02
    """The same for projections that write into the residual stream."""
    sinks: bool = False
    """True if each head has a learned logit that takes part in its softmax and has no value. Attention with such logits
    sets its attribute `sinks` to true."""
    attention_dropout: float = 0.0
    """Share of attention's weights that is zeroed in training. Attention that does so has it as an attribute."""


class FeedForward(Protocol):
    """`feed_forward`: a layer's channel mixer, an `nn.Module`: `[batch, sequence, dim]` → the same."""

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """Spec of a head, passed by a model to the plugin that builds it."""

    dim: int
    """Features of the hidden states that the head is given."""
    vocabulary: int
    """Number of token ids."""
    std: float = 0.02
    """Standard deviation of initial weights."""
    divisor: float = 1.0
    """Logits are divided by this. A head that does so has an attribute `divisor` with this value."""
    soft_cap: float | None = None
    """Logits, once divided, become `cap · tanh(logits / cap)` (Gemma 2, arXiv:2408.00118). A head that does so has an
    attribute `soft_cap` with this value."""


class Head(Protocol):
    """`head`: what turns hidden states into outputs, an `nn.Module`: `[batch, sequence, dim]` → outputs.

    Its plugin's `gives` says what the outputs are. It may declare `tensor_plan()`, module name → style, the empty name
    for itself; without, tensor parallelism keeps it whole on every rank and hands it whole sequences.
    """

    def __call__(self, hidden: Tensor) -> Tensor: ...
