"""Modules after a model's layers: its head, further layers in training, and the classes of labels.

Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

__all__ = [
    "Classes",
    "Drafting",
    "Head",
    "HeadSpec",
    "Tail",
    "Trunk",
]

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .model import Slots


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


@dataclass(frozen=True, slots=True)
class Trunk:
    """Description of a model, and factories for parts, for the plugin that builds its tail."""

    dim: int
    """Features of the hidden states."""
    layers: int
    """Number of the model's own layers."""
    norm: Callable[[], nn.Module]
    """Makes a norm like the final one."""
    embedding: Callable[[], nn.Module]
    """Makes a look-up in the model's embedding table; its `weight` is the embedding's."""
    layer: Callable[[int, int], nn.Module]
    """Makes one more layer, from its number (from 0) and the number of all further layers. The module is called as
    `layer(hidden, position_ids, document_ids, cache)`, and declares `tensor_plan()`, `flops_per_token(sequence)` and
    `new_slots(slots)`, which makes its cache for rows side by side, or raises TypeError."""
    std: float = 0.02
    """Standard deviation of initial weights."""


class Tail(Protocol):
    """`tail`: what follows a model's last layer in training, an `nn.Module`, which the model keeps as `tail`.

    In training mode, the model calls it with the hidden states for the head. It finds whatever else it needs of the
    batch in `job.step.batch`; outside a step, it returns its input. Like a model, it declares `units` (the names
    of its layers), `tensor_plan()` and `flops_per_token(sequence)`.
    """

    @property
    def units(self) -> tuple[str, ...]: ...
    def __call__(self, hidden: Tensor, position_ids: Tensor | None, document_ids: Tensor | None) -> Tensor:
        """`[batch, sequence, dim]` → `[n · batch, sequence, dim]`: the same rows, then further rows for the head."""
        ...

    def tensor_plan(self) -> dict[str, Any]: ...
    def flops_per_token(self, sequence: int) -> int:
        """FLOPs of its layers; the model adds the head's for the further rows."""
        ...


@runtime_checkable
class Drafting(Protocol):
    """A tail that can also draft the tokens after the next one, for generation."""

    depths: int
    """Tokens that it can draft at once."""

    def new_slots(self, depth: int, slots: Slots) -> Any:
        """The cache of one depth for rows side by side, as a layer of `Trunk.layer` makes it.

        Raises:
            TypeError: it can't have one that forgets tokens.
        """
        ...

    def draft(self, depth: int, hidden: Tensor, ids: Tensor, position_ids: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        """Computes one depth, outside of the model's forward pass: on every layout, it is given whole sequences and
        returns such.

        Args:
            depth: its number, from 0.
            hidden: `[batch, sequence, dim]`: at depth 0 the hidden states for the head, then those of the depth before.
            ids: ids of the tokens `depth + 1` after each position, `[batch, sequence]`.
            position_ids: the positions, `[batch, sequence]`.
            cache: the cache of this depth; None for tokens that do not count.

        Returns:
            The hidden states for the next depth, and those for the head, which predict the token `depth + 2` after each
            position.
        """
        ...


@dataclass(frozen=True, slots=True)
class Classes:
    """The classes that labels stand for (`classes`)."""

    names: tuple[str, ...]
    """Names of the classes; label k is the k-th, from 0."""
    of: Literal["text", "token"]
    """Granularity of the labels: one for each text, or one for each token."""
