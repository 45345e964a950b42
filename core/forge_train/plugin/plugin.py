"""Plugin base class: one instance per run and process, configured by its own section."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import pluggy

from ..base.errors import PluginError
from ..config.schema import section

__all__ = ["API", "Plugin", "hookimpl"]

PROJECT = "forge_train"
API = (1, 0)
"""The plugin API of this core: (major, minor). A plugin written for a newer one, or another major one, is refused."""

_F = TypeVar("_F", bound=Callable[..., object])
MARK = f"{PROJECT}_impl"
"""The attribute that `@hookimpl` puts on a method."""
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
    gives: ClassVar[Mapping[str, str]] = {}
    """Slot that it fills → what it gives the providers of other slots: `{"head": "class_logits"}`. What a slot gives
    where nothing is said stands in the slot's spec."""
    takes: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Slot → what it can take from that slot's provider: `{"head": ("class_logits",)}`; empty for nothing, which fits
    anything. A run in which a task, a loss or another plugin is given something else is refused."""
    layout: ClassVar[bool] = False
    """True if it only decides where and how tensors are laid out, or only measures: its settings may differ between a
    checkpoint and the run that resumes it."""
    needs: ClassVar[Mapping[str, str]] = {}
    """Importable module → the command that installs it."""
    devices: ClassVar[tuple[str, ...]] = ()
    """Types of device that it runs on, as `("cuda",)`; empty for all. A run on another one is refused."""
    after_observers: ClassVar[bool] = False
    """True if it is called after all other observers, as trackers are, and so sees what they record."""
    facts: ClassVar[Mapping[str, bool | float | str | tuple[str, ...]]] = {}
    """Facts that tools read: `{"plan.per_unit": True}`. A subclass inherits those of its bases. `docs/facts.md` lists
    the ones of Forge's own tools."""

    @section
    class Config:
        """No options."""

    config: Any

    def __init__(self, config: Any) -> None:
        self.config = config

    @classmethod
    def implied_values(cls, config: Any) -> Mapping[str, Any]:
        """Values of other keys that follow from its section, for keys that nobody set: a folder of tokens brings
        `{"tokenizer.path": …}`. Keys of plugins that are not enabled are left out. Called before anything slow is
        imported."""
        return {}
