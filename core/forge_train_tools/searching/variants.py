"""Plugins and options among which the search chooses, as the plugins state them."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

from forge_train.base.names import PluginRef, canonical
from forge_train.mesh.axes import AXES
from forge_train.registry.discovery import discover
from forge_train.registry.setup import Setup
from forge_train_kit.axes import installed
from forge_train_kit.source import Source

from ..configuration.request import Request, split_assignments
from ..facts import SEARCH


@dataclass(frozen=True)
class Choice:
    """A plugin with some of its options, or that it is left out."""

    plugin: str = ""
    """That is to be enabled; empty if it is enabled already, or nothing of the kind is chosen."""
    settings: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    """Plugins whose place it takes."""
    own: bool = False
    """True for what the configuration has itself."""

    @cached_property
    def _hash(self) -> int:
        return hash((self.plugin, self.settings, self.without, self.own))

    def __hash__(self) -> int:
        """Computed once, as caches ask for it a hundred times for each candidate."""
        return self._hash

    def __str__(self) -> str:
        return ", ".join(self.settings) or self.plugin or (f"no {', '.join(self.without)}" if self.without else "")


NOTHING = Choice()


@dataclass(frozen=True)
class Variant:
    """One choice of each kind."""

    choices: tuple[tuple[str, Choice], ...]
    """Kind (what the plugins provide) → choice."""

    @cached_property
    def _hash(self) -> int:
        return hash((self.choices,))

    def __hash__(self) -> int:
        """Computed once, as caches ask for it a hundred times for each candidate."""
        return self._hash

    @cached_property
    def _by_kind(self) -> dict[str, Choice]:
        return dict(self.choices)

    def of(self, kind: str) -> Choice:
        return self._by_kind.get(kind, NOTHING)

    def request(self, request: Request) -> Request:
        """The user's request with these plugins and options."""
        chosen = [one for _, one in self.choices]
        dropped = {name for one in chosen for name in one.without}
        return replace(
            request,
            plugins=(*(n for n in request.plugins if n not in dropped), *(one.plugin for one in chosen if one.plugin)),
            without=tuple(dict.fromkeys((*request.without, *sorted(dropped)))),
            set=(*request.set, *(setting for one in chosen for setting in one.settings)),
        )

    def __str__(self) -> str:
        return "; ".join(filter(None, (str(one) for _, one in self.choices)))


@dataclass(frozen=True)
class Options:
    """Everything that may be chosen."""

    axes: Mapping[str, tuple[Choice, ...]] = field(default_factory=dict)
    """Axis → what a layout with it above 1 needs."""
    others: Mapping[str, tuple[Choice, ...]] = field(default_factory=dict)
    """Kind → alternatives for every layout; the first is the configuration's own."""
    unvaried: tuple[str, ...] = ()
    """Axes and enabled layout plugins that stay as they are."""

    def variants(self, axes: Sequence[str]) -> Iterator[Variant]:
        """All combinations for a layout in which these axes are above 1."""
        needed = {kind: self.axes[kind] for kind in self.axes if kind in axes}
        kinds = {**needed, **self.others}
        for chosen in product(*kinds.values()):
            yield Variant(tuple(zip(kinds, chosen, strict=True)))


def options_of(setup: Setup, request: Request) -> Options:
    """Read from the installed plugins what there is to choose.

    Args:
        setup: of the configuration, for several processes.
        request: the user's; plugins that it names, and values that it sets, stay as they are.
    """
    pinned, asked = pinned_keys(request), {canonical(name) for name in request.plugins}
    removed = {canonical(name) for name in request.without}
    kinds: dict[str, list[tuple[PluginRef, tuple[str, ...]]]] = {}
    for found in discover():
        if found.name not in removed and (stated := SEARCH.read(found)):
            kinds.setdefault(_provided(found), []).append((found, stated))
    axes: dict[str, tuple[Choice, ...]] = {}
    others: dict[str, tuple[Choice, ...]] = {}
    enabled = setup.hooks.enabled
    for kind, plugins in kinds.items():
        fixed = [one for one in plugins if one[0].name in asked]
        plugins = fixed or plugins
        own = [found.name for found, _ in plugins if found.name in enabled]
        choices = [one for found, stated in plugins for one in _choices(found.name, stated, own, pinned)]
        if kind in AXES:
            axes[kind] = tuple(choices)
            continue
        default = any(enabled[name].default for name in own)
        nothing = [] if default or fixed else [Choice(without=tuple(own), own=not own)]
        others[kind] = tuple(sorted([*nothing, *choices], key=lambda one: not one.own))
    searched = {found.name for plugins in kinds.values() for found, _ in plugins}
    left = [f"parallel.{axis}" for axis in sorted(installed())]
    left += [name for name, one in sorted(enabled.items()) if one.cls.layout and name not in searched]
    return Options(axes, others, tuple(left))


def pinned_keys(request: Request) -> frozenset[str]:
    """Keys that the command line or the environment sets."""
    assignments = (*request.set, *split_assignments(request.environment))
    return frozenset(one.partition("=")[0].strip() for one in assignments)


def _choices(name: str, stated: Sequence[str], own: Sequence[str], pinned: Collection[str]) -> Iterator[Choice]:
    """The choices of one plugin; options that are pinned stay as they are."""
    displaced = tuple(other for other in own if other != name)
    seen = set()
    for text in stated:
        settings = tuple(split_assignments(text))
        kept = tuple(one for one in settings if one.partition("=")[0] not in pinned)
        if kept not in seen:
            seen.add(kept)
            yield Choice("" if name in own else name, kept, displaced, own=name in own)


def _provided(found: PluginRef) -> str:
    """The kinds that a plugin provides, from its source; its own name if that is nothing."""
    value = Source(found).assigned("provides")
    provided = ast.literal_eval(value) if value is not None else ()
    return str(provided[0]) if provided else found.name
