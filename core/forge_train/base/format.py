"""Formatting of sizes, lists and source locations for messages."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

BINARY = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def format_digits(value: float, digits: int) -> str:
    """A number from 1 to 1000 with that many significant digits."""
    return f"{value:.{max(digits - len(str(int(abs(value)))), 0)}f}"


def format_bytes(size: float) -> str:
    """Bytes in the unit that fits."""
    for limit, unit in BINARY:
        if size >= limit * 0.9995:
            return f"{format_digits(size / limit, 3)} {unit}"
    return f"{int(size)} B"


def format_list(items: Iterable[object], shown: int = 3, between: str = ", ") -> str:
    """`a, b, c, … 4 more`: the first of a list, in text."""
    texts = [str(item) for item in items]
    return between.join(texts[:shown] + [f"… {len(texts) - shown} more"] * (len(texts) > shown))


def place(member: Any) -> str:
    """`file:line` of a method, of the function inside what wraps it, or of an object's class."""
    if isinstance(member, property):
        member = member.fget
    member = inspect.unwrap(getattr(member, "func", getattr(member, "__func__", member)))
    code = getattr(member, "__code__", None)
    if code is not None:
        return shown(code.co_filename, code.co_firstlineno)
    cls = member if isinstance(member, type) else type(member)
    try:
        return shown(inspect.getsourcefile(cls) or "?", inspect.getsourcelines(cls)[1])
    except (OSError, TypeError):
        return f"{cls.__module__}.{cls.__qualname__}"


def shown(file: str, line: int) -> str:
    """A place in the source, its file relative to the current folder where it lies in it."""
    path = Path(file)
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{line}"
