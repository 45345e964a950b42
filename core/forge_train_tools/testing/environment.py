"""Simulated installation of plugins: classes that no distribution provides, in place of the installed ones."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType

from forge_train.base.names import PluginRef, canonical, snake
from forge_train.plugin.plugin import Plugin
from forge_train.registry import discovery
from forge_train.registry.discovery import DISTRIBUTION

LOCAL = "forge_train_local"
"""Module for classes that can't be imported by name, such as those defined inside a test."""

_REAL = tuple(discovery.SOURCES)


def really_installed() -> frozenset[PluginRef]:
    """Return the plugins found without the test kit, and so by every other process."""
    return frozenset(found for source in _REAL for found in source())


class Installed:
    """The plugins that can be found while the block of `installed` lasts."""

    def __init__(self, keep: bool) -> None:
        self._before = [found for source in discovery.SOURCES for found in source()]
        self._kept = set(self._before) if keep else set()
        self._own: dict[str, PluginRef] = {}
        self._modules: list[str] = []

    def add(self, plugin: type[Plugin], *, name: str = "", distribution: str = "under-test", version: str = "0") -> str:
        """Make a class a plugin as if it were installed; gives the name it can be enabled by.

        Args:
            plugin: any class, also one that is defined inside a test.
            name: its entry point's name; by default that under which the class really is installed, or the class's own
                in snake case. Another plugin of that name is gone.
            distribution: what brings it, for messages.
            version: of the distribution.
        """
        known = next((found for found in self._before if found.object == _path(plugin)), None)
        if known and not name:
            self._own[known.name] = known
            return known.name
        name = canonical(name or snake(plugin.__name__))
        self._own[name] = PluginRef(name, distribution, version, self._importable(plugin, name))
        return name

    def add_broken(self, name: str, target: str, *, distribution: str = "under-test", version: str = "0") -> str:
        """Install an entry point by what it says, `package.module:Class`, whether or not that exists."""
        self._own[canonical(name)] = PluginRef(canonical(name), distribution, version, target)
        return canonical(name)

    def restore(self, *names: str) -> None:
        """Have plugins that are really installed found again: these, or without names all of forge's own."""
        wanted = {canonical(name) for name in names}
        found = [f for f in self._before if (f.name in wanted if wanted else f.distribution == DISTRIBUTION)]
        if missing := wanted - {one.name for one in found}:
            raise LookupError(f"not installed: {', '.join(sorted(missing))}")
        self._kept |= set(found)

    def names(self) -> list[str]:
        """Names of all plugins that can be found, sorted."""
        return sorted({found.name for found in self()})

    def __call__(self) -> Iterable[PluginRef]:
        return [*(found for found in self._kept if found.name not in self._own), *self._own.values()]

    def _importable(self, plugin: type[Plugin], name: str) -> str:
        if _path(plugin):
            return _path(plugin)
        module = ModuleType(f"{LOCAL}.{name}")
        setattr(module, plugin.__name__, plugin)
        sys.modules[module.__name__] = module
        self._modules.append(module.__name__)
        return f"{module.__name__}:{plugin.__name__}"

    def _forget(self) -> None:
        for name in self._modules:
            sys.modules.pop(name, None)


def _path(plugin: type[Plugin]) -> str:
    """`package.module:Class` of a class that can be imported by it, or the empty string."""
    module = sys.modules.get(plugin.__module__)
    return f"{plugin.__module__}:{plugin.__name__}" if getattr(module, plugin.__name__, None) is plugin else ""


@contextmanager
def installed(plugins: Iterable[type[Plugin]] = (), *, keep: bool = True) -> Iterator[Installed]:
    """For as long as the block lasts, have other plugins installed than there are.

    Args:
        plugins: classes to install; more can be added inside the block.
        keep: whether what is really installed is found too.
    """
    fake = Installed(keep)
    before = discovery.SOURCES[:]
    discovery.SOURCES[:] = [fake]
    try:
        for plugin in plugins:
            fake.add(plugin)
        yield fake
    finally:
        discovery.SOURCES[:] = before
        fake._forget()
