"""Gradients that the current backward pass must compute, for pipelines that split input and weight gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Wanted = Literal["both", "input", "weight"]

# A module global, not a context variable: backward passes run in autograd's own threads.
_wanted: Wanted = "both"


def wanted_gradients() -> Wanted:
    """Return the gradients that a `torch.autograd.Function` with an input and a weight must compute in `backward`.

    Autograd calls the function in both halves of a split backward pass, and `ctx.needs_input_grad` is true of both
    operands in either (pytorch issue 174017): a function that does not check this computes each gradient twice. It may
    return None for the other gradient.
    """
    return _wanted


@contextmanager
def only_gradients(wanted: Wanted) -> Iterator[None]:
    """An executor's half of a backward pass."""
    global _wanted  # noqa: PLW0603  # see above
    before, _wanted = _wanted, wanted
    try:
        yield
    finally:
        _wanted = before
