"""Gradients that the current backward pass must compute, for pipelines that split input and weight gradients."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Literal

from ..scoped import ScopedValue

Wanted = Literal["both", "input", "weight"]

_wanted: ScopedValue[Wanted] = ScopedValue("both")


def wanted_gradients() -> Wanted:
    """Return the gradients that a `torch.autograd.Function` with an input and a weight must compute in `backward`.

    Autograd calls the function in both halves of a split backward pass, and `ctx.needs_input_grad` is true of both
    operands in either (pytorch issue 174017): a function that does not check this computes each gradient twice. It may
    return None for the other gradient.
    """
    return _wanted.value


def only_gradients(wanted: Wanted) -> AbstractContextManager[None]:
    """An executor's half of a backward pass."""
    return _wanted.set_to(wanted)
