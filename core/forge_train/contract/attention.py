"""Attention: a layer's token mixer, the kernel that computes it, and what kernels can do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class KernelCapabilities:
    """Capabilities of an attention kernel, or those requested of one.

    A kernel receives the keyword argument of each capability that it declares, and no others.
    """

    documents: bool = False
    """`document_ids`: tokens see their own document only."""
    offsets: bool = False
    """`offset`, and more keys than queries: queries at other positions than keys."""
    windows: bool = False
    """`window`: a query sees so many positions, its own the last of them."""
    dropout: bool = False
    """`dropout`: weights named by a `DroppedWeights` are set to zero after the softmax, and the others are divided by
    the rest."""
    soft_caps: bool = False
    """`soft_cap`: logits become `cap · tanh(logits / cap)` (Gemma 2, arXiv:2408.00118)."""
    sinks: bool = False
    """`sinks`: a logit for each head that takes part in the softmax and has no value (arXiv:2309.17453)."""
    log_sum_exp: bool = False
    """`log_sum_exp=True`: also returns the logarithm of each query's sum of exponentials."""
    blocks: bool = False
    """`query_document_ids`, and an `offset` beyond the keys: these are a block, of which a query may see nothing."""
    head_dims: tuple[int, ...] = ()
    """Features per head; as a capability, empty is any."""
    devices: tuple[str, ...] = ()
    """Types of device, like `cuda`; as a capability, empty is any."""

    def lacks(self, asked: KernelCapabilities) -> Iterator[str]:
        """Yield a phrase for each requested capability that is missing."""
        for one in fields(self):
            mine, wanted = getattr(self, one.name), getattr(asked, one.name)
            if isinstance(mine, bool):
                if wanted and not mine:
                    yield _PHRASES[one.name]
            elif mine and (missing := [value for value in wanted if value not in mine]):
                yield _PHRASES[one.name].format(missing[0])


_PHRASES = {
    "documents": "document masks",
    "offsets": "queries at other positions than keys",
    "windows": "sliding windows",
    "dropout": "dropout of attention weights",
    "soft_caps": "soft caps",
    "sinks": "sinks",
    "log_sum_exp": "the log-sum-exp",
    "blocks": "keys in blocks, of which a query may see none",
    "head_dims": "heads of {} features",
    "devices": "the device {!r}",
}


class AttentionKernel(Protocol):
    """`attention_kernel`: scaled dot-product attention, causal, with grouped queries."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Causal attention.

        Args:
            query: `[batch, sequence, heads, head_dim]`.
            key: `[batch, key_sequence, kv_heads, head_dim]`; heads is a multiple of kv_heads, each serving
                heads // kv_heads neighbouring query heads.
            value: as `key`.

        Keyword arguments, those but `scale` only for a kernel that declares them in `Plugin.kernel_capabilities`:
            scale: of the logits, 1/√head_dim by default.
            document_ids: `[batch, key_sequence]` int64 of the keys, and of the queries at their positions. A kernel may
                count on the tokens of a document being neighbours.
            offset: position of the first query, counted from the first key; key_sequence - sequence by default, so that
                the last query sees every key of a cache. Keys beyond the last query are seen by none. Every query sees
                a key at least, where a kernel is not asked for `blocks`.
            window: positions that a query sees, itself included; all by default.
            dropout: a `DroppedWeights`, which determines by positions which weights are zero; none by default.
                The log-sum-exp is that of all weights.
            soft_cap: none by default.
            sinks: `[heads]`.
            log_sum_exp: whether to return it.
            query_document_ids: `[batch, sequence]` of the queries, or None without documents, where keys are a block
                of all, and `document_ids` of the block alone. A query that sees no key gets 0, and as its log-sum-exp
                −∞, without gradients.

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
