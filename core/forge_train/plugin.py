"""What a plugin is: one class, one instance per run and process, configured by its own section."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar, dataclass_transform

import pluggy
from annotated_types import Ge, Gt, Le, Lt

from .errors import PluginError

__all__ = ["API", "FilePath", "Ge", "Gt", "Le", "Lt", "Plugin", "Volatile", "hookimpl", "section"]

PROJECT = "forge_train"
API = (1, 0)
"""The plugin API of this core: (major, minor). A plugin written for a newer one, or another major one, is refused."""

_C = TypeVar("_C")
_F = TypeVar("_F", bound=Callable[..., object])
_mark = pluggy.HookimplMarker(PROJECT)


def hookimpl(function: _F | None = None, /, *arguments: Any, **options: Any) -> _F:
    """Mark a method as the implementation of the hook of its name.

    There are no options: order comes from phases, slots and sorted names, never from registration.

    Raises:
        PluginError: for options or parentheses, and for what is no method.
    """
    if function is None or arguments or options:
        given = ", ".join([*map(repr, arguments), *(f"{name}={value!r}" for name, value in options.items())])
        raise PluginError(f"write @hookimpl without parentheses and options, found @hookimpl({given})")
    method = getattr(function, "__func__", function)  # of a staticmethod or a classmethod
    if not inspect.isroutine(method):
        raise PluginError(f"@hookimpl marks a method, found a {type(function).__name__}.")
    _mark(method)
    return function


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
                f"{cls.__qualname__}.{name} has no type, so it is no option: write {name}: {_type(value)}"
            )
    cls.__pydantic_config__ = {  # type: ignore[attr-defined]
        "extra": "forbid",
        "allow_inf_nan": False,
        "validate_default": True,
        "revalidate_instances": "always",  # a default that is a section is looked into
    }
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


def _type(value: object) -> str:
    return f"{type(value).__name__} = {value!r}"


class Plugin:
    """The base of every plugin. `self.config` is the validated section of the run's configuration.

    An attribute `state_dict` / `load_state_dict` pair makes the plugin part of every checkpoint.
    """

    api: ClassVar[tuple[int, int]] = (1, 0)
    """The plugin API this plugin was written for. The base stays (1, 0) for ever; say your own."""
    requires: ClassVar[tuple[str, ...]] = ()
    """Slots or plugins that must be enabled beside this one."""
    conflicts: ClassVar[tuple[str, ...]] = ()
    """Slots or plugins that can't be enabled beside this one."""
    provides: ClassVar[tuple[str, ...]] = ()
    """Slots of the transforms it may give; those of its hooks are known without."""
    layout: ClassVar[bool] = False
    """Whether it only decides where and how tensors lie: what it is set to may differ between a checkpoint and the run
    that resumes it."""
    needs: ClassVar[Mapping[str, str]] = {}
    """Importable module → the command that installs it."""
    devices: ClassVar[tuple[str, ...]] = ()
    """Types of device that it runs on, as `("cuda",)`; empty for all. A run on another one is refused."""
    saves: ClassVar[tuple[str, ...]] = ()
    """Parts of a rank's memory that it makes smaller: `activations`; or those that it spreads over ranks, of
    `parameters`, `gradients` and `optimizer`. Where memory runs out, an installed plugin is recommended by it; so that
    nothing is imported for that, it is read as text: write the tuple out."""
    architectures: ClassVar[tuple[str, ...]] = ()
    """Architectures of a `config.json` that its `import_hf` reads; read as text, as `saves` is."""
    rounds: ClassVar[bool] = False
    """Whether it rounds below `train.precision`: `forge verify` allows for as much as that changes, and has
    `--against train.precision=…` compare with a run without it."""
    example: ClassVar[tuple[str, ...]] = ()
    """Assignments, as of `--set`, with which `plugins check` tries it where its defaults do not train: a required key,
    or `train.precision=fp16`; and `plugins=a,b` for others that it is tried with."""

    @section
    class Config:
        """No options."""

    config: Any

    def __init__(self, config: Any) -> None:
        self.config = config
