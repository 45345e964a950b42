"""The results of what plugins gave, checked at every call: types and sizes only, so that the host waits for nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..errors import PluginError
from .places import place
from .returns import Kind, kind_of, results


class Guarded:
    """An object of a plugin that is used as it is, but for its methods' results, which are checked.

    Args:
        inner: the object.
        protocol: says what each method must give.
        whose: the plugin and the hook, for messages.
    """

    def __init__(self, inner: Any, protocol: type, whose: str) -> None:
        self._inner = inner
        for name, kind in results(protocol).items():
            if kind.words != "None":
                setattr(self, name, guarded(getattr(inner, name), kind, whose, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def first_in_full(cls: type) -> Kind:
    """A record of which the first is looked at field by field, and the others by their type."""
    kind, seen = kind_of(cls), False

    def problem(value: Any) -> str:
        nonlocal seen
        if seen and isinstance(value, cls):
            return ""
        seen = True
        return kind.problem(value)

    return Kind(kind.words, problem)


def guarded(function: Callable[..., Any], kind: Kind, whose: str, name: str) -> Callable[..., Any]:
    """A function whose results are checked."""
    problem = kind.problem

    @functools.wraps(function)
    def checked(*arguments: Any, **more: Any) -> Any:
        value = function(*arguments, **more)
        if text := problem(value):
            raise PluginError(f"{whose}: {name} ({place(function)}) must return {kind.words}, {text}.")
        return value

    return checked
