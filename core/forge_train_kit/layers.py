"""The layers of a model: what a plugin knows about the layer it builds, and what its modules must offer.

Importing this module imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from forge_train.base.errors import ConfigError
from forge_train.base.format import format_list

__all__ = ["Attention", "AttentionKernel", "AttentionOptions", "FeedForward", "Layer", "Projected", "Recurrence"]

if TYPE_CHECKING:
    from torch import Tensor, nn

    from forge_train_kit.capabilities import KernelCapabilities

    from .model.attention_dropout import DroppedWeights


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
    """Attention's logits become `cap · tanh(logits / cap)`; None: no cap."""
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
    prefix: bool = False
    """True if the tokens of a prefix see each other. Attention that does so has it as an attribute, and its forward
    takes `prefix_ends` as `AttentionOptions` does, or None."""


class FeedForward(Protocol):
    """`feed_forward`: a layer's channel mixer, an `nn.Module`: `[batch, sequence, dim]` → the same."""

    def __call__(self, x: Tensor) -> Tensor: ...


class Attention(Protocol):
    """`attention`: a layer's token mixer, an `nn.Module`. It exposes its kernel, if it has one, as `.kernel`. If it
    carries a state along the sequence instead, it exposes that computation as `.recurrence`."""

    def __call__(
        self,
        x: Tensor,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """`[batch, sequence, dim]` → the same; `position_ids`, `document_ids`: `[batch, sequence]` or None.

        `cache` is what the model's `new_cache` made for this layer, or None.
        """
        ...


class Projected(Protocol):
    """Attention that keeps what it computes of each token alone apart from what mixes tokens, so that it can have
    several sets of these weights. Its forward calls both methods."""

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """`[batch, sequence, dim]` → what is mixed, such as queries, keys and values, `[batch, sequence, …]` each."""
        ...

    def output(self, mixed: Tensor, /) -> Tensor:
        """Outputs from what they were mixed into, `[batch, sequence, …]` → `[batch, sequence, dim]`."""
        ...

    def another(self) -> nn.Module:
        """A module with these two methods and weights of its own, under the same names; called on the meta device."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Options of one call of an attention kernel. Without any, attention is causal and scaled by 1/√head_dim.

    Each option but `scale` needs the `KernelCapabilities` named in brackets.
    """

    scale: float | None = None
    """Factor on the logits."""
    document_ids: Tensor | None = None
    """[documents] `[batch, key_sequence]` int64 of the keys, and of the queries at their positions. A kernel may count
    on the tokens of a document being neighbours."""
    offset: int | None = None
    """[offsets] Position of the first query, counted from the first key; by default, the last query sees every key of a
    cache. No query sees keys beyond the last query. Every query sees at least one key, unless the kernel declares
    `blocks`."""
    window: int | None = None
    """[windows] Number of positions that a query sees, its own included."""
    dropout: DroppedWeights | None = None
    """[dropout] Determines by positions which weights are zero. The log-sum-exp includes all weights."""
    soft_cap: float | None = None
    """[soft_caps] Logits become `cap · tanh(logits / cap)`."""
    sinks: Tensor | None = None
    """[sinks] `[heads]`: a logit for each head that takes part in the softmax and has no value."""
    log_sum_exp: bool = False
    """[log_sum_exp] Return the log-sum-exp as well."""
    query_document_ids: Tensor | None = None
    """[blocks] `[batch, sequence]` of the queries, where the keys are a block of all keys, and `document_ids` those of
    the block. A query that sees no key gets 0, and −∞ as its log-sum-exp, without gradients."""
    lengths: Tensor | None = None
    """[lengths] `[batch]` int64: each row has one query, which sees this many keys, the first ones; the others are
    finite. Not beside documents, a window, an offset or dropout."""
    prefix_ends: Tensor | None = None
    """[prefixes] `[batch, sequence]` int64 of the queries: a query in a prefix sees all keys of its document before
    this position, counted from the first key, whatever the window; others have 0. Not beside lengths and blocks."""

    def __post_init__(self) -> None:
        if self.prefix_ends is not None and (self.lengths is not None or self.query_document_ids is not None):
            raise ConfigError("Attention takes no prefixes beside lengths of rows or keys in blocks.")
        beside = (self.document_ids, self.query_document_ids, self.window, self.offset, self.dropout)
        if self.lengths is not None and any(one is not None for one in beside):
            raise ConfigError("Attention takes no lengths of rows beside documents, a window, an offset or dropout.")

    def first_query(self, query: Tensor, key: Tensor) -> int:
        """Return the position of the first query, counted from the first key."""
        return key.shape[1] - query.shape[1] if self.offset is None else self.offset

    def factor(self, query: Tensor) -> float:
        """Return the factor on the logits: `scale`, or 1/√head_dim."""
        return query.shape[-1] ** -0.5 if self.scale is None else self.scale

    def needs(self, query: Tensor, key: Tensor) -> tuple[str, ...]:
        """Return the names of the `KernelCapabilities` that a call with these options needs.

        Options alone do not say it: keys beside fewer queries need `offsets`, and a first query after the last key
        needs `blocks`.
        """
        queries, keys = query.shape[1], key.shape[1]
        options = (
            ("documents", self.document_ids),
            ("windows", self.window),
            ("dropout", self.dropout),
            ("soft_caps", self.soft_cap),
            ("sinks", self.sinks),
            ("log_sum_exp", self.log_sum_exp or None),
            ("lengths", self.lengths),
            ("prefixes", self.prefix_ends),
        )
        needed = [flag for flag, value in options if value is not None]
        if self.offset is not None or (queries != keys and self.lengths is None):
            needed.append("offsets")
        if self.query_document_ids is not None or not 0 <= self.first_query(query, key) <= keys - queries:
            needed.append("blocks")
        return tuple(needed)

    def check(self, able: KernelCapabilities, query: Tensor, key: Tensor) -> None:
        """Refuse a call that a kernel would otherwise compute without some of its options.

        Args:
            able: the kernel's capabilities.
            query: of the call; so is `key`.

        Raises:
            ConfigError: if the call needs others.
        """
        if lacking := [flag for flag in self.needs(query, key) if not getattr(able, flag)]:
            raise ConfigError(
                f"Attention was called with options that its kernel does not support: {format_list(lacking)}. A layer "
                "that needs them must ask for them with kernel_with()."
            )


class AttentionKernel(Protocol):
    """`attention_kernel`: scaled dot-product attention, causal, with grouped queries."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Any:
        """Causal attention.

        Args:
            query: `[batch, sequence, heads, head_dim]`.
            key: `[batch, key_sequence, kv_heads, head_dim]`; heads is a multiple of kv_heads, each serving
                heads // kv_heads neighbouring query heads.
            value: as `key`.
            options: of this call; a kernel refuses those that it does not support with `options.check(…)`.

        Returns:
            `[batch, sequence, heads, head_dim]`; with `log_sum_exp`, and `[batch, heads, sequence]` in float32.
        """
        ...


class Recurrence(Protocol):
    """A token mixer's `.recurrence`, if it has no kernel: everything it does along the sequence, per head.

    The mixer has the attributes `heads` and `kv_heads`, counted over the whole model. Context parallelism wraps the
    recurrence, so that each rank exchanges its slices of all heads for whole sequences of some heads.
    """

    def __call__(self, *inputs: Tensor, document_ids: Tensor | None = None, part: tuple[int, int] = (0, 1)) -> Tensor:
        """Runs from the first position to the last; each document starts from its own state.

        Args:
            inputs: `[batch, sequence, heads, features]` each, of one dtype; heads and features may differ.
            document_ids: `[batch, sequence]` int64.
            part: index and number of equal parts of each input's heads; take the same part of the parameters.

        Returns:
            `[batch, sequence, heads, features]`, with the heads of one of the inputs.
        """
        ...
