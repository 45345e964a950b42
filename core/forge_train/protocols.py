"""What plugins and core hand each other: one typed protocol for every slot and chain, one dataclass for every event.

Shapes are written `[batch, sequence, …]`. Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor, nn

MASKED = -100
"""The label of a position that is not trained on."""

Scalar: TypeAlias = "Annotated[Tensor, 'one value']"
"""A 0-dim tensor."""


@dataclass(frozen=True, slots=True)
class Init:
    """How a parameter starts.

    Args:
        kind: `normal` (mean 0), `uniform` (mean 0), `ones` or `zeros`.
        std: standard deviation of the first two kinds.
    """

    kind: Literal["normal", "uniform", "ones", "zeros"]
    std: float = 0.02


@dataclass(frozen=True, slots=True)
class Layer:
    """What a chain is told about the layer it builds a module for."""

    index: int
    count: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    """Width of a dense feed-forward block."""
    norm_eps: float = 1e-6
    bias: bool = False
    """Whether output projections (attention's o, feed-forward) have biases."""
    qkv_bias: bool = False
    qk_norm: bool = False
    rope: nn.Module | None = None
    """The rotary embedding shared by all layers: `rope(x [batch, sequence, heads, head_dim], positions) → x`."""
    std: float = 0.02
    """Standard deviation of initial weights."""
    output_std: float = 0.02
    """The same for projections that write into the residual stream."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch of one rank."""

    inputs: Tensor
    """Token ids, `[batch, sequence]` int64."""
    labels: Tensor
    """The next token at each position, `[batch, sequence]` int64; −100 is masked."""
    positions: Tensor | None = None
    """Position of each token in its document or its row, whichever began later, `[batch, sequence]` int64."""
    documents: Tensor | None = None
    """Document number of each token within its row, `[batch, sequence]` int64: attention stays inside a document."""
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """More tensors, split along their first axis with the rest (images, soft targets, rewards); the model gets each
    as a keyword argument of its name."""

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device; copies from pinned memory do not wait."""

        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=True)

        return replace(
            self,
            inputs=self.inputs.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
            positions=move(self.positions),
            documents=move(self.documents),
            extras={name: value.to(device, non_blocking=True) for name, value in self.extras.items()},
        )

    def model_inputs(self) -> dict[str, Tensor]:
        """Keyword arguments of the model's forward beside the token ids; what is None is left out."""
        known = {"positions": self.positions, "documents": self.documents}
        return {name: value for name, value in {**known, **self.extras}.items() if value is not None}


@runtime_checkable
class Loader(Protocol):
    """`build_data`: a stateful, endless iterator of this rank's micro-batches.

    Global micro-batch g = position × data ranks + data index, so that ranks which share a data index get the same
    batch, and so that any number of data-parallel ranks can resume the stream.
    """

    def __iter__(self) -> Iterator[Batch]: ...
    def __next__(self) -> Batch: ...
    def state_dict(self) -> dict[str, Any]:
        """JSON only. `position`: the sequences that all ranks together have been given; equal on all ranks."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def skip(self, sequences: int) -> None:
        """Move on by that many sequences of the global stream (all ranks together)."""
        ...


class Tokenizer(Protocol):
    """`tokenizer`: text to token ids and back."""

    vocabulary: int
    """Number of token ids."""
    begin: tuple[int, ...]
    """Ids that precede each document and each prompt; as a rule none, or one."""
    end: int | None
    """The id that follows each document, if there is one."""
    stops: tuple[int, ...]
    """Ids that end a generated text, `end` among them."""
    digest: str
    """Differs between tokenizers that give other ids: token caches lie under it, and resuming compares it."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without `begin` and `end`."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...


@runtime_checkable
class DocumentEncoder(Protocol):
    """A tokenizer that encodes many documents at once, which is faster than one by one; it need not."""

    def encode_documents(self, documents: Sequence[bytes]) -> Sequence[NDArray[Any]]:
        """Ids of UTF-8 texts, one array of integers each, without `begin` and `end`."""
        ...


class AttentionKernel(Protocol):
    """`attention_kernel`: scaled dot-product attention, causal, with grouped queries."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        documents: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Causal attention; the last query sees every key (so a cache may hold more keys than there are queries).

        Args:
            query: `[batch, sequence, heads, head_dim]`.
            key: `[batch, key_sequence, kv_heads, head_dim]`; heads is a multiple of kv_heads, each serving
                heads // kv_heads neighbouring query heads.
            value: as `key`.
            documents: `[batch, sequence]` (only with sequence == key_sequence): tokens see their own document only.
            scale: of the logits, 1/√head_dim by default.

        Returns:
            `[batch, sequence, heads, head_dim]`.
        """
        ...


class Attention(Protocol):
    """`attention`: a layer's token mixer, an `nn.Module`. Where it has a kernel it exposes it as `.kernel`."""

    def __call__(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """`[batch, sequence, dim]` → the same; `positions`, `documents`: `[batch, sequence]` or None.

        `cache` is what the model's `new_cache` made for this layer, or None.
        """
        ...


class FeedForward(Protocol):
    """`feed_forward`: a layer's channel mixer, an `nn.Module`: `[batch, sequence, dim]` → the same."""

    def __call__(self, x: Tensor) -> Tensor: ...


class TokenDispatch(Protocol):
    """`token_dispatch`: the transport of tokens to the ranks of their experts, and back."""

    def dispatch(
        self, x: Tensor, experts: Tensor, count: int, *, meanwhile: Callable[[], None] | None = None
    ) -> tuple[Tensor, Tensor, Any]:
        """`x [tokens, dim]`, `experts [tokens, top_k]` in 0…count-1, or −1 for nowhere → rows sorted by local expert,
        rows per local expert `[local experts]`, and a handle for `combine`.

        There may be more rows than the sizes sum to; nobody looks at what comes of those. `meanwhile` is work that a
        transport may do, once, while rows are under way.
        """
        ...

    def combine(self, rows: Tensor, weights: Tensor, handle: Any) -> Tensor:
        """Rows as `dispatch` gave them, `weights [tokens, top_k]` → `[tokens, dim]`."""
        ...


class LossFunction(Protocol):
    """`loss`: sum of the losses of the unmasked positions, a 0-dim float32 tensor.

    `hidden [batch, sequence, dim]`, `labels [batch, sequence]`. It calls `head` as a module, on whole or on chunks of
    `hidden`, and never touches its weights: they may be sharded.
    """

    def __call__(self, hidden: Tensor, head: nn.Module, labels: Tensor) -> Scalar: ...


class Task(Protocol):
    """`task`: the logic of a step, for training and for forward-only jobs."""

    def weight(self, batch: Batch) -> int | float:
        """What the batch counts in the mean: unmasked targets. Called with the batch still on the CPU."""
        ...

    def loss(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Scalar:
        """Sum of the batch's losses; `hidden` is what the last part gave."""
        ...

    def outputs(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        """What a forward-only job wants: logits `[batch, sequence, vocabulary]`, as a rule."""
        ...


class Executor(Protocol):
    """`executor`: runs forward and backward over the step's micro-batches."""

    def train(self, batches: Sequence[Batch], scale: Tensor | float) -> Scalar:
        """Accumulate gradients of `scale` × the summed losses; gives the unscaled loss sum, a plain tensor.

        Calls `model.on_micro_batch(last)` before each micro-batch. `batches` lie on the job's device.
        """
        ...

    def evaluate(self, batch: Batch) -> Scalar:
        """The batch's loss sum without gradients, a plain tensor."""
        ...


class Schedule(Protocol):
    """`lr_schedule`: sets the learning rates; `step()` is called after every optimizer step that was not skipped."""

    def step(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class LossScale(Protocol):
    """`loss_scale`: scales the loss so that small gradients survive a narrow dtype."""

    def scale(self) -> Tensor | float:
        """The factor of this step; gradients are divided by it before their norm is taken."""
        ...

    def update(self, skipped: bool) -> None:
        """Called once a step, with whether it was vetoed."""
        ...

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


PrepareBatch = Callable[[Batch], Batch]
"""`prepare_batch`: one function of the chain of steps every micro-batch goes through, on the CPU."""

SpanName = Literal["step", "forward_backward", "optimizer", "evaluate", "save"]
Span = Callable[[], AbstractContextManager[Any]]
"""`around`: makes a context manager for one pass through the span."""

BASES: Mapping[type, str] = {Attention: "nn.Module", FeedForward: "nn.Module"}
"""What an object must be beside having the methods of its protocol."""


@dataclass(frozen=True, slots=True)
class HFModel:
    """How a model stands in Hugging Face layout (`import_hf`, `export_hf`).

    Args:
        config: the `config.json`, for export.
        sections: plugin name → its configuration, for import.
        names: parameter name in forge → tensor name in Hugging Face layout. A tied parameter is named once.
        leftovers: patterns of tensors that files may hold beside these, and that follow from the configuration.
    """

    names: Mapping[str, str]
    config: Mapping[str, Any] = field(default_factory=dict)
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    leftovers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Problem:
    """A mistake in the configuration found by `check_config`: the dotted key, and what is wrong with it."""

    key: str
    message: str
