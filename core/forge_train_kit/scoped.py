"""A global value that holds while a block lasts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

_T = TypeVar("_T")


class ScopedValue(Generic[_T]):
    """A global value that a block sets and restores.

    Not a context variable: recompute and backward passes run in autograd's own threads, which would not see it.
    """

    def __init__(self, value: _T) -> None:
        self.value = value

    @contextmanager
    def set_to(self, value: _T) -> Iterator[None]:
        """Set the value while the block lasts."""
        before, self.value = self.value, value
        try:
            yield
        finally:
            self.value = before
