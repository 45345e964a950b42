"""Declared types and annotations of a section's fields."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Iterator
from typing import Any, TypeVar

from .toml import Key

_M = TypeVar("_M")


def annotation_of(cls: type, key: Key) -> Any:
    """The declared type of a field, or Any where the section has none of that name."""
    if not key or not dataclasses.is_dataclass(cls):
        return Any
    hints = _hints(cls)
    if key[0] not in hints:
        return Any
    annotation = hints[key[0]]
    if len(key) == 1:
        return annotation
    inner, rest = table_type(annotation), key[1:]
    if inner is None:
        inner = next((found for item in _items(annotation) if (found := table_type(item))), None)
        if inner is not None and not rest[1:]:
            return inner
        rest = rest[1:]  # the place in the list
    return annotation_of(inner, rest) if inner else Any


def table_type(annotation: Any) -> type | None:
    """The section that a field holds, if it is a table."""
    found = (member for member in members_of(annotation) if dataclasses.is_dataclass(member))
    return typing.cast(type | None, next(found, None))


def _items(annotation: Any) -> Iterator[Any]:
    """The types of a list's items."""
    for member in members_of(annotation):
        if typing.get_origin(member) in (tuple, list):
            yield from typing.get_args(member)


@functools.cache
def _hints(section: type) -> dict[str, Any]:
    return typing.get_type_hints(section, include_extras=True)


def mark(cls: type, key: Key, kind: type[_M]) -> _M | None:
    """The mark of a kind (`Volatile`, `FilePath`) on a field, or None."""
    marks = getattr(annotation_of(cls, key), "__metadata__", ())
    return next((one for one in marks if isinstance(one, kind)), None)


def members_of(annotation: Any) -> tuple[Any, ...]:
    """The members of a union without their annotations; the type itself otherwise."""
    if typing.get_origin(annotation) is typing.Annotated:
        return members_of(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(inner for member in typing.get_args(annotation) for inner in members_of(member))
    return (annotation,)
