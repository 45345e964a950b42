"""Whole sequences on every rank, outside of a step, whatever a layout cuts sequences into."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_whole = [False]  # a list, which torch.compile guards


@contextmanager
def whole_rows() -> Iterator[None]:
    """A block in which the ranks of context parallelism are given whole sequences, each its own, and exchange none.

    Generated text needs it: a single token can't be cut into slices.
    """
    before, _whole[0] = _whole[0], True
    try:
        yield
    finally:
        _whole[0] = before


def rows_are_whole() -> bool:
    """True inside of `whole_rows`. Modules that put slices together ask this."""
    return _whole[0]
