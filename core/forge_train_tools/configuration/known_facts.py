"""Facts that installed tools declare, and the check of what a plugin states."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from forge_train.base.errors import ConfigError, describe, nearest
from forge_train.base.format import place, shown
from forge_train.base.names import import_module, locate
from forge_train.plugin.calls import EnabledPlugin
from forge_train.registry.discovery import DISTRIBUTION, entry_points, identity
from forge_train_kit.facts import Fact, facts_in, stated
from forge_train_kit.source import Source

GROUP = "forge_train.facts"


class Facts:
    """The facts that plugins may state. A tool's module is imported when a plugin states one of its facts."""

    def __init__(self) -> None:
        self._loaded: dict[str, dict[str, Fact[Any]]] = {}

    def all(self) -> dict[str, Fact[Any]]:
        """Return every declared fact, by name; of two with one name, Forge's own."""
        homes = [(tool, module, label) for tool, modules in self._tools.items() for module, label in modules.items()]
        homes.sort(key=lambda home: (_is_ours(home[2]), home))
        return {name: fact for tool, module, label in homes for name, fact in self._facts(tool, module, label).items()}

    def find(self, name: str) -> Fact[Any] | None:
        """Return a declared fact: Forge's own, or else that of another distribution, imported only then.

        Raises:
            ConfigError: if two other distributions declare it, or their module can't be imported.
        """
        tool = name.partition(".")[0]
        modules = self._tools.get(tool, {}).items()
        for ours in (True, False):
            homes = [(module, label) for module, label in sorted(modules) if _is_ours(label) is ours]
            found = {f"{label} ({module})": self._facts(tool, module, label).get(name) for module, label in homes}
            found = {owner: fact for owner, fact in found.items() if fact is not None}
            if len(found) > 1:
                raise ConfigError(f"It is declared by {' and '.join(found)}: uninstall one.")
            if found:
                return next(iter(found.values()))
        return None

    def _facts(self, tool: str, module: str, label: str) -> Mapping[str, Fact[Any]]:
        if module not in self._loaded:
            self._loaded[module] = _load(module, label)
        return {name: fact for name, fact in self._loaded[module].items() if name.startswith(f"{tool}.")}

    def problems(self, enabled: EnabledPlugin) -> Iterator[str]:
        """Yield a sentence for each fact of a plugin that nobody declares, or that has another type."""
        for cls in enabled.cls.__mro__:
            facts: Any = vars(cls).get("facts", {})
            if not isinstance(facts, Mapping) or not all(isinstance(name, str) for name in facts):
                at = f"({place(cls)})"
                yield f'Plugin {enabled.ref.label}: `facts` {at} must map names, like {{"plan.per_unit": True}}.'
                return
        for name, value in stated(enabled.cls).items():
            home = next(base for base in enabled.cls.__mro__ if name in vars(base).get("facts", {}))
            try:
                problem = self._problem(enabled, name, value)
            except ConfigError as error:
                problem = f": {error}"
            if problem:
                yield f"Plugin {enabled.ref.label}: fact {name!r} ({_key_place(home, name)}){problem}"

    def _problem(self, enabled: EnabledPlugin, name: str, value: object) -> str:
        own = facts_in(sys.modules.get(enabled.cls.__module__, object()))
        tool = name.partition(".")[0]
        fact = own.get(name) or self.find(name)
        if fact is None:
            if self._tools.get(tool) == {}:
                return ""
            hint = nearest(name, [*own, *self.all()]) or " Install the package that declares it, or remove the fact."
            return f" is declared by no installed tool.{hint}"
        if not fact.fits(value):
            return f" must be {fact.described}, found {value!r}."
        if fact.literal and (source := Source(enabled.ref)).fact(name) != value and source.node(name):
            return f" is read from the source: write its value out in class {enabled.cls.__qualname__}, as a literal."
        return ""

    @cached_property
    def _tools(self) -> dict[str, dict[str, str]]:
        """Tool → module of its facts → distribution. A tool of Forge whose code was left out has no module."""
        found: dict[str, dict[str, str]] = defaultdict(dict)
        for point in entry_points(GROUP):
            name, version = identity(point.dist)
            modules = found[point.name]
            if name != DISTRIBUTION or locate(point.value):
                modules[point.value] = f"{name} {version}".strip()
        return found


def _is_ours(label: str) -> bool:
    return label.partition(" ")[0] == DISTRIBUTION


def _load(module: str, label: str) -> dict[str, Fact[Any]]:
    try:
        return facts_in(import_module(module))
    except (Exception, SystemExit) as error:  # whatever a stranger's module does while it is imported
        raise ConfigError(f"the facts of {label} failed to import ({module}): {describe(error)}.") from error


def _key_place(cls: type, key: str) -> str:
    """`file:line` of a string in the source of a class, or of the class where it is not written out."""
    try:
        lines, first = inspect.getsourcelines(cls)
        tree = ast.parse(textwrap.dedent("".join(lines)))
        file = inspect.getsourcefile(cls) or "?"
    except (OSError, TypeError, SyntaxError):
        return place(cls)
    found = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value == key]
    return shown(file, first + found[0] - 1) if found else place(cls)
