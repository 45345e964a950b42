"""What may follow a model's last layer in training: more layers that share its embedding and its head.

Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Trunk:
    """What a model tells the plugin that builds its tail, and makes for it."""

    dim: int
    """Features of the hidden states."""
    layers: int
    """Number of the model's own."""
    norm: Callable[[], nn.Module]
    """Makes a norm like the final one."""
    embedding: Callable[[], nn.Module]
    """Makes a look-up in the model's own table: its `weight` is the embedding's."""
    layer: Callable[[int, int], nn.Module]
    """Makes one more layer: its number, from 0, and how many there will be → a module with the arguments of a layer,
    `layer(hidden, position_ids, document_ids, cache)`, that declares `tensor_plan()`, `flops_per_token(sequence)` and
    `new_cache(batch, length)`."""
    std: float = 0.02
    """Standard deviation of initial weights."""


class Tail(Protocol):
    """`tail`: what follows a model's last layer in training, an `nn.Module`, which the model keeps as `tail`.

    The model calls it in training mode, with the hidden states that are otherwise for the head. What it needs of the
    batch beyond that is in `job.step_state.micro`; without a step, it returns its input. It declares `units`, its own
    layers by name, `tensor_plan()` and `flops_per_token(sequence)`, as models do.
    """

    @property
    def units(self) -> tuple[str, ...]: ...
    def __call__(self, hidden: Tensor, position_ids: Tensor | None, document_ids: Tensor | None) -> Tensor:
        """`[batch, sequence, dim]` → `[n · batch, sequence, dim]`: the same, and behind it more rows for the head."""
        ...

    def tensor_plan(self) -> dict[str, Any]: ...
    def flops_per_token(self, sequence: int) -> int:
        """Of its layers; the model adds what the head costs for the further rows."""
        ...


@runtime_checkable
class Drafting(Protocol):
    """A tail that can guess the tokens after the next one, for generation; it need not."""

    depths: int
    """Tokens that it can guess at once."""

    def new_cache(self, batch: int, length: int) -> Any:
        """A cache for each depth, as of `Trunk.layer`."""
        ...

    def draft(self, depth: int, hidden: Tensor, ids: Tensor, position_ids: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        """One depth, from 0.

        Args:
            depth: which.
            hidden: `[batch, sequence, dim]`: at depth 0 what the model gives the head, else what the depth before gave.
            ids: of the token `depth + 1` after each position, `[batch, sequence]`.
            position_ids: of these positions, `[batch, sequence]`.
            cache: of this depth.

        Returns:
            What the next depth is given, and what the head is given for the token `depth + 2` after each position.
        """
        ...
