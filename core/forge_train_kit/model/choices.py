"""Discrete decisions inside a model, such as a router's, told to whoever compares two runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal

from ..scoped import ScopedValue

if TYPE_CHECKING:
    from torch import Tensor, nn

Made = Callable[[], "tuple[Tensor, Tensor]"]
Among = Literal["alternatives", "tokens"]
Listener = Callable[["nn.Module", str, Made, Among], None]

_listener: ScopedValue[Listener | None] = ScopedValue(None)


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
    if (listener := _listener.value) is not None:
        listener(module, what, made, among)


def heard_by(listener: Listener) -> AbstractContextManager[None]:
    """Pass choices to a listener while the block lasts."""
    return _listener.set_to(listener)
