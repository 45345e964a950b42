"""Discrete decisions inside a model, such as a router's, told to whoever compares two runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor, nn

Made = Callable[[], "tuple[Tensor, Tensor]"]
Among = Literal["alternatives", "tokens"]
Listener = Callable[["nn.Module", str, Made, Among], None]

# A module global, not a context variable: recompute runs forwards in autograd's own threads.
_listener: Listener | None = None


def record_choices(module: nn.Module, what: str, made: Made, *, among: Among = "alternatives") -> None:
    """Tell `forge verify` what a module has decided; in training this does nothing, and `made` is not called.

    Where two scores are equal up to rounding, another layout may choose otherwise, and then all that follows differs
    although nothing is wrong. Whoever calls this has such a tie told from a fault. Call it in the forward pass, for
    every micro-batch, on whatever tokens a rank has: all of them, a slice, or a copy of another rank's.

    Args:
        module: that decides, for its name.
        what: is chosen, in the plural, such as `experts`; one name for each decision of the module, in their order.
        made: gives the scores the choice goes by, `[tokens, alternatives]`, −∞ for what can't be chosen, and, bool of
            the same shape, what was taken. Tokens come sequence by sequence.
        among: each token chooses among alternatives, or each alternative among the tokens.
    """
    if _listener is not None:
        _listener(module, what, made, among)


@contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Have choices told to a listener while the block lasts."""
    global _listener  # noqa: PLW0603  # see above
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before
