"""The hooks of models with experts, for their own plugin and for others that have experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from forge_train import Job, hookspec

if TYPE_CHECKING:
    from torch import Tensor


class TokenDispatch(Protocol):
    """`token_dispatch`: the transport of tokens to the ranks of their experts, and back."""

    def dispatch(
        self, x: Tensor, experts: Tensor, count: int, *, meanwhile: Callable[[], None] | None = None
    ) -> tuple[Tensor, Tensor, Any]:
        """`x [tokens, dim]`, `experts [tokens, top_k]` in 0…count-1, or −1 for nowhere → rows sorted by local expert,
        rows per local expert `[local experts]`, and a handle for `combine`.

        There may be more rows than the sizes sum to; their results are ignored. `meanwhile` is work that a
        transport may do, once, while rows are under way.
        """
        ...

    def combine(self, rows: Tensor, weights: Tensor, handle: Any) -> Tensor:
        """Rows as `dispatch` gave them, `weights [tokens, top_k]` → `[tokens, dim]`."""
        ...


class ExpertGroups(Protocol):
    """`expert_groups`: divides tokens and experts into groups. A token chooses among the experts of its group."""

    @property
    def of_experts(self) -> Sequence[int]:
        """The group of each expert, from 0."""
        ...

    def of_tokens(self, x: Tensor, piece: tuple[int, int]) -> Tensor:
        """The group of each token of the micro-batch at hand, `[batch, sequence]` int64.

        Args:
            x: hidden states `[batch, sequence, dim]`.
            piece: index of the piece of each sequence that `x` is, and number of pieces: `(0, 1)` if sequences are
                whole, or as whole as context parallelism leaves them.
        """
        ...


@hookspec("questions", asked="composition")
def expert_groups(experts: int, job: Job) -> ExpertGroups | None:
    """Divide tokens and experts into groups, each with a router of its own; called for each layer with experts."""


@hookspec("slot", optional=True, asked="composition")
def token_dispatch(job: Job) -> TokenDispatch:
    """The transport of tokens to their experts."""
    raise AssertionError
