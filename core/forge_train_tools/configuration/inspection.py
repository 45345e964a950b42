"""Checks of a plugin's class before it is used: methods must be hooks with matching signatures, options a section."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import typing
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from forge_train.base.errors import PluginError, Problem, describe, nearest
from forge_train.base.format import place
from forge_train.base.names import PluginRef
from forge_train.config import Config
from forge_train.config.schema import no_toml
from forge_train.plugin.calls import EnabledPlugin, implemented
from forge_train.plugin.plugin import MARK, Plugin
from forge_train.plugin.specs import HookSpec
from forge_train.registry.discovery import CONTRIB, DISTRIBUTION
from forge_train_kit.capabilities import KernelCapabilities, capabilities_of
from forge_train_kit.return_checks import Returns

from .known_facts import Facts
from .rules import problems

Specs = Mapping[str, HookSpec[..., Any]]
_sound: weakref.WeakKeyDictionary[type, tuple[object, ...]] = weakref.WeakKeyDictionary()
"""Classes without a mistake, and what that was found of: looking at one takes longer than constructing it."""
_NO_METHODS = (property, functools.cached_property, functools.partial)


class Inspection(Returns):
    """Looks at the classes of plugins, and at what they return."""

    def __init__(self) -> None:
        self._mistakes = inspector()

    def problems(self, config: Config) -> Iterator[Problem]:
        return problems(config)

    def mistakes(self, plugin: EnabledPlugin) -> list[str]:
        return self._mistakes(plugin)


def inspector() -> Callable[[EnabledPlugin], list[str]]:
    """A function that gives the mistakes in a plugin's hooks, in its section, and in what its class says of itself."""
    facts = Facts()

    def mistakes(enabled: EnabledPlugin) -> list[str]:
        specs = enabled.specs
        seen = (enabled.ref, frozenset(specs.values()), *map(id, vars(enabled.cls).values()))
        if _sound.get(enabled.cls) == seen:
            return [*facts.problems(enabled)]
        found = undecorated(enabled, specs)
        if implemented(enabled.cls) or not found:
            found += unknown(enabled, specs)
        found += [*misfits(enabled, specs), *malformed(enabled, specs), *halved(enabled), *_constructor(enabled)]
        found += filter(None, [section_problem(enabled.ref, enabled.cls)])
        if not found:
            _sound[enabled.cls] = seen
        return [*found, *facts.problems(enabled)]

    return mistakes


def unknown(enabled: EnabledPlugin, specs: Specs) -> list[str]:
    """Decorated methods that are no hooks; a class without any hook."""
    cls, label = enabled.cls, enabled.ref.label
    if not implemented(cls):
        where = f"class {cls.__qualname__} ({place(cls)})"
        return [f"Plugin {label} implements no hook: {where} has no method marked with @hookimpl.{_alike(cls, specs)}"]
    own = enabled.ref.distribution == DISTRIBUTION and not enabled.ref.module.startswith(CONTRIB)
    stale = " Forge's metadata is older than its code: install it again with `pip install -e .`." if own else ""
    missing = " If another package declares it, install it."
    return [
        f"Plugin {label} implements unknown hook {name!r} ({place(getattr(cls, name))})."
        f"{stale or nearest(name, specs) or missing}"
        for name in sorted(implemented(cls) - specs.keys())
    ]


def undecorated(enabled: EnabledPlugin, specs: Specs) -> list[str]:
    """Members that have a hook's name and would never be called."""
    members = set().union(*map(vars, enabled.cls.__mro__))
    names = [name for name in specs if name in members]
    return [f"Plugin {enabled.ref.label}: {text}" for name in names if (text := _undecorated(enabled.cls, name))]


def misfits(enabled: EnabledPlugin, specs: Specs) -> list[str]:
    """Hooks whose arguments are not those that the hook is called with."""
    return [
        f"Plugin {enabled.ref.label} does not fit the hooks: {text}"
        for name in sorted(implemented(enabled.cls) & specs.keys())
        for text in _misfits(enabled.cls, specs[name])
    ]


def malformed(enabled: EnabledPlugin, specs: Specs) -> list[str]:
    """Return a message for each attribute of the class that is not in the form that core reads."""
    cls, found = enabled.cls, []
    for name in ("requires", "conflicts", "provides", "devices"):
        value: Any = getattr(cls, name)
        if not (isinstance(value, tuple) and all(isinstance(item, str) for item in value)):
            found.append(f'`{name}` must be a tuple of strings, like ("a",), found {value!r}.')
    for name, fits, like in (
        ("gives", lambda value: isinstance(value, str), '{"head": "class_logits"}'),
        ("takes", lambda value: isinstance(value, tuple), '{"head": ("class_logits",)}'),
    ):
        value = getattr(cls, name)
        if not (isinstance(value, Mapping) and all(map(fits, value.values()))):
            found.append(f"`{name}` must map slots, like {like}, found {value!r}.")
            continue
        if strange := sorted(set(value) - specs.keys()):
            found.append(f"`{name}` names {strange[0]!r}, which is no slot.{nearest(strange[0], specs)}")
        if name == "gives" and (absent := sorted(set(value) - enabled.provides)):
            found.append(f"`gives` names {absent[0]!r}, a slot that it neither fills nor has in `provides`.")
    able: Any = capabilities_of(cls)
    if not isinstance(able, KernelCapabilities):
        found.append(f"`kernel_capabilities` must be KernelCapabilities(…), found {able!r}.")
    needs: Any = cls.needs
    if not (isinstance(needs, Mapping) and all(isinstance(item, str) for pair in needs.items() for item in pair)):
        found.append(f"`needs` must say which command installs which module, found {needs!r}.")
    return [f"Plugin {enabled.ref.label}: {text}" for text in found]


def _constructor(enabled: EnabledPlugin) -> list[str]:
    """Return an error if the class can't be constructed from its section alone."""
    try:
        inspect.signature(enabled.cls).bind("config")
    except TypeError as error:
        where = place(enabled.cls.__init__)
        return [f"Plugin {enabled.ref.label}: __init__ ({where}) must take `config` and nothing else: {error}."]
    return []


def halved(enabled: EnabledPlugin) -> list[str]:
    """State that would be saved and never loaded, or the other way round."""
    pair = [name for name in ("state_dict", "load_state_dict") if hasattr(enabled.cls, name)]
    text = f"Plugin {enabled.ref.label} has {''.join(pair)} alone; without its counterpart nothing is saved."
    return [text] if len(pair) == 1 else []


def _undecorated(cls: type[Plugin], name: str) -> str:
    """Describe why a member named like a hook would never be called; empty if it would be."""
    member = inspect.getattr_static(cls, name, None)
    if not (callable(member) or isinstance(member, (staticmethod, classmethod, *_NO_METHODS))):
        return ""
    where = f"{cls.__qualname__}.{name} ({place(member)})"
    if isinstance(member, _NO_METHODS) or not inspect.isroutine(getattr(cls, name)):
        kind = type(member).__name__
        return f"{where} is named like a hook, but is a {kind}. Write a method marked with @hookimpl, or rename it."
    if hasattr(getattr(cls, name), MARK):
        return ""
    return f"{where} is named like a hook, but is not marked with @hookimpl. Write @hookimpl above it, or rename it."


def _alike(cls: type[Plugin], specs: Specs) -> str:
    """A hook that one of the class's own methods is nearly named like."""
    for name, member in vars(cls).items():
        if inspect.isroutine(member) and not name.startswith("__") and (hint := nearest(name, specs)):
            return f" It has {name!r}.{hint}"
    return ""


def _misfits(cls: type[Plugin], spec: HookSpec[..., Any]) -> Iterator[str]:
    hook = spec.name
    method = getattr(cls, hook)
    if not inspect.isroutine(method):
        return
    where = f"{hook} ({place(method)})"
    if options := [name for name, value in getattr(method, MARK).items() if value]:
        yield f"{where} is marked with options ({', '.join(options)}), which have no effect. Use forge_train.hookimpl."
    if inspect.iscoroutinefunction(method):
        yield f"{where} is `async`, so nothing would run it. Write a plain method."
    if inspect.isgeneratorfunction(method) and spec.kind == "event":
        yield f"{where} contains `yield`, so nothing would run it. To act before and after a span, implement `around`."
    valid = spec.arguments
    parameters = list(inspect.signature(getattr(method, "__func__", method)).parameters.values())
    if not isinstance(inspect.getattr_static(cls, hook), staticmethod):
        if not parameters or parameters[0].name in valid or parameters[0].kind is parameters[0].KEYWORD_ONLY:
            yield f"{where} lacks `self`, its first argument."
            return
        del parameters[0]
    for one in parameters:
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            stars = "*" if one.kind is one.VAR_POSITIONAL else "**"
            yield f"{where} takes {stars}{one.name}, which would stay empty. Name what it needs of {', '.join(valid)}."
        elif one.kind is one.POSITIONAL_ONLY:
            yield f"{where} takes {one.name!r} before a `/`. Remove the `/`: hooks get their arguments by name."
        elif one.kind is one.KEYWORD_ONLY:
            yield f"{where} takes {one.name!r} after a `*`. Remove the `*`: hooks get their arguments by name."
        elif one.name not in valid and one.default is one.empty:
            known = f"the hook{spec.declared} does not have. It has {_nearest_first(one.name, valid)}."
            yield f"{where} takes {one.name!r}, which {known}"


def _nearest_first(name: str, valid: list[str]) -> str:
    ranked = sorted(valid, key=lambda other: -difflib.SequenceMatcher(None, name, other).ratio())
    return ", ".join(ranked)


def section_problem(ref: PluginRef, cls: type[Plugin]) -> str:
    """Return an error if a plugin's `Config` is not a section; else empty."""
    try:
        check_section(cls.Config)
    except Exception as error:  # whatever a stranger wrote there
        reason = str(error) if isinstance(error, PluginError) else describe(error)
        return f"Plugin {ref.label}: its Config is not a section: {reason}."
    return ""


_VALUES = (bool, int, float, str, type(None), Path, Any, tuple, list, dict, Mapping, Sequence)
"""Types of which a TOML value is one, or can be read as one and written again."""


def check_section(cls: Any) -> None:
    """Check that a class, and every class inside it, is a section with options that TOML can express.

    Raises:
        PluginError: if one is not.
    """
    if not dataclasses.is_dataclass(cls) or "__pydantic_config__" not in vars(cls):
        raise _no_section(cls)
    _check_options(typing.cast(type, cls))


@functools.lru_cache(maxsize=256)  # reading annotations is slow; what is refused is looked at again
def _check_options(cls: Any) -> None:
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


def _no_section(cls: Any) -> PluginError:
    return PluginError(
        f"class {getattr(cls, '__qualname__', cls)} ({place(cls)}) lacks @section; write @section above it"
    )
