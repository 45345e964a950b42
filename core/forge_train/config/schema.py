"""Declaration of configuration sections."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, dataclass_transform

from annotated_types import Ge, Gt, Le, Lt

from ..base.errors import PluginError
from ..base.places import place

__all__ = ["FilePath", "Ge", "Gt", "Le", "Lt", "Volatile", "section"]

_C = TypeVar("_C")


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


_VALUES = (bool, int, float, str, type(None), Path, Any, tuple, list, dict, Mapping, Sequence)
"""Types of which a TOML value is one, or can be read as one and written again."""


def check_section(cls: Any) -> None:
    """Check that a class, and every class inside it, is a section with options that TOML can express.

    Raises:
        PluginError: if one is not.
    """
    if not dataclasses.is_dataclass(cls) or "__pydantic_config__" not in vars(cls):
        raise _undecorated(cls)
    for name, annotation in typing.get_type_hints(cls).items():
        for kind in _classes(annotation):
            if dataclasses.is_dataclass(kind):
                check_section(kind)
            elif kind not in _VALUES:
                raise no_toml(typing.cast(type, cls), f" ({name}: {kind.__qualname__})")


def _classes(annotation: Any) -> Iterator[type]:
    """Yield the classes that make up a type."""
    if typing.get_origin(annotation) in (typing.Literal, typing.ClassVar):
        return
    for inner in typing.get_args(annotation):
        yield from _classes(inner)
    if isinstance(annotation, type) and typing.get_origin(annotation) is None:
        yield annotation


def _undecorated(cls: Any) -> PluginError:
    return PluginError(
        f"class {getattr(cls, '__qualname__', cls)} ({place(cls)}) lacks @section; write @section above it"
    )


def no_toml(cls: type, option: str = "") -> PluginError:
    """Build the error for a section with an option that TOML can't express."""
    return PluginError(
        f"class {cls.__qualname__} ({place(cls)}) has an option of a type that no TOML value has{option}; use int, "
        "float, bool, str, Literal, tuples, dictionaries and sections"
    )
