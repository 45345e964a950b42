"""Source locations for messages."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any


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
