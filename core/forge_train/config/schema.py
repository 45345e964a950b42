"""Declaration of configuration sections, and the types and marks of their fields."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Iterator
from typing import Any, TypeVar, dataclass_transform

from annotated_types import Ge, Gt, Le, Lt

from ..base.errors import PluginError
from ..base.format import place
from .tree import Key

__all__ = ["FilePath", "Ge", "Gt", "Le", "Lt", "Volatile", "section"]

_C = TypeVar("_C")
_M = TypeVar("_M")


@dataclasses.dataclass(frozen=True)
class Volatile:
    """Marks a configuration field that changes no number: left out of the hash and of the comparison at resume.

    Use it as ``Annotated[int, Volatile()]``.
    """


@dataclasses.dataclass(frozen=True)
class FilePath:
    """Marks a configuration field that names a file or a folder, as in ``Annotated[str, FilePath()]``.

    In a TOML file, a relative path starts at that file's folder; elsewhere, where the command was started. The plugin
    gets an absolute path, so that a configuration can be moved together with the files it names.

    Args:
        words: values that are no paths.
        dotted: whether the value may also name an object: `file.py:NAME` has a path, `package.module:NAME` has none.
    """

    words: tuple[str, ...] = ()
    dotted: bool = False


@dataclass_transform(frozen_default=True, kw_only_default=True)
def section(cls: type[_C]) -> type[_C]:
    """Make a class a configuration section: a frozen, keyword-only dataclass in which unknown keys are errors.

    Raises:
        PluginError: for a value without a type, which would be no option.
    """
    for name, value in vars(cls).items():
        plain = not (name.startswith("_") or callable(value) or hasattr(value, "__get__"))
        if plain and name not in cls.__annotations__:
            raise PluginError(
                f"{cls.__qualname__}.{name} has no type, so it is no option: "
                f"write {name}: {type(value).__name__} = {value!r}"
            )
    cls.__pydantic_config__ = {  # type: ignore[attr-defined]
        "extra": "forbid",
        "allow_inf_nan": False,
        "validate_default": True,
        "revalidate_instances": "always",  # a default that is a section is looked into
    }
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


def no_toml(cls: type, option: str = "") -> PluginError:
    """Build the error for a section with an option that TOML can't express."""
    return PluginError(
        f"class {cls.__qualname__} ({place(cls)}) has an option of a type that no TOML value has{option}; use int, "
        "float, bool, str, Literal, tuples, dictionaries and sections"
    )


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
