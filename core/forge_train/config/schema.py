"""How a section of the configuration is declared."""

from __future__ import annotations

import dataclasses
from typing import TypeVar, dataclass_transform

from annotated_types import Ge, Gt, Le, Lt

from ..ground.errors import PluginError

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
    """

    words: tuple[str, ...] = ()


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
