"""Errors, files, names: what the other rooms stand on. It imports nothing else of forge."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[dict[str, str], Callable[[str], Any], Callable[[], list[str]]]:
    """Prepare a package whose public names are imported on first use.

    Args:
        package: its `__name__`.
        homes: module inside the package → the names defined there, separated by spaces.

    Returns:
        name → module, and the package's `__getattr__` and `__dir__`.
    """
    where = {name: module for module, names in homes.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{where[name]}", package), name)
        setattr(sys.modules[package], name, value)
        return value

    return where, get, lambda: sorted({*vars(sys.modules[package]), *where})


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
