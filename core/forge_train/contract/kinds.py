"""The kinds of hooks, and what their specs declare besides their signatures; filled by `hookspecs`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import pluggy

from .plugin import PROJECT

Kind = Literal["slot", "chain", "phases", "steps", "spans", "event", "questions"]
KINDS: dict[str, Kind] = {}
"""Hook name → kind."""
OPTIONAL: set[str] = set()
"""Slots that may stay empty."""
Stage = Literal["composition", "step"]
GIVES: dict[str, str] = {}
"""Slot → what its provider gives to others, unless `Plugin.gives` says something else."""
TAKES: dict[str, dict[str, tuple[str, ...]]] = {}
"""Slot → what its provider takes from the providers of other slots, unless `Plugin.takes` says something else."""
ASKED: dict[str, Stage] = {}
"""Hook → when it has been asked for, if it ever is: once the model is composed, or once a step is ready to be taken."""

_F = TypeVar("_F", bound=Callable[..., Any])
_spec = pluggy.HookspecMarker(PROJECT)


def hook(
    kind: Kind,
    *,
    optional: bool = False,
    asked: Stage | None = None,
    gives: str = "",
    takes: Mapping[str, tuple[str, ...]] | None = None,
) -> Callable[[_F], _F]:
    """Marks a function as the spec of a hook."""

    def mark(function: _F) -> _F:
        KINDS[function.__name__] = kind
        if gives:
            GIVES[function.__name__] = gives
        if takes:
            TAKES[function.__name__] = dict(takes)
        if asked:
            ASKED[function.__name__] = asked
        if optional:
            OPTIONAL.add(function.__name__)
        return _spec(function)

    return mark
