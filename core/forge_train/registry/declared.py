"""The hooks that distributions declare, read from metadata and as text; a run imports those it needs.

A module of specs is an entry point of the group `forge_train.hookspecs`. A plugin in a file, of contrib or named by its
path, may declare hooks in that file.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError, ForgeError, describe
from ..base.format import place
from ..base.names import import_module, is_file, locate
from ..plugin import hookspecs
from ..plugin.calls import EnabledPlugin, implemented
from ..plugin.specs import HookSpec, specs_of
from .discovery import CONTRIB, DISTRIBUTION, contributed, entry_points, identity, own_version

GROUP = "forge_train.hookspecs"
_SPEC = re.compile(r"^@(?:\w+\.)?hookspec\(.*?^def (\w+)\(", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class SpecModule:
    """A module of hook specs that could be imported."""

    distribution: str
    version: str
    module: str
    """Its dotted name, or the path of its file."""

    @property
    def label(self) -> str:
        return f"{self.distribution} {self.version}".strip()

    @property
    def file(self) -> Path | None:
        return Path(self.module) if is_file(self.module) else locate(self.module)

    @property
    def text(self) -> str:
        """Its source."""
        return self.file.read_text(encoding="utf-8", errors="replace") if self.file and self.file.is_file() else ""

    @cached_property
    def declares(self) -> frozenset[str]:
        """Names of its hooks, read as text."""
        return frozenset(_SPEC.findall(self.text))

    def load(self) -> dict[str, HookSpec[..., Any]]:
        """Import it, and give its specs.

        Raises:
            ConfigError: if it can't be imported.
        """
        try:
            module = import_module(self.module)
        except (Exception, SystemExit) as error:  # whatever a stranger's module does while it is imported
            reason = str(error) if isinstance(error, ForgeError) else describe(error)
            raise ConfigError(
                f"The hook specs of {self.label} failed to import ({self.module}): {reason.rstrip('.')}. "
                f"Repair or uninstall {self.distribution}."
            ) from error
        specs = specs_of(module)
        for spec in specs.values():
            spec.owner = "" if self.distribution == DISTRIBUTION else self.label
        return specs


def _entry_points() -> Iterator[SpecModule]:
    for point in entry_points(GROUP):
        yield SpecModule(*identity(point.dist), point.value.strip())


def _contributed() -> Iterator[SpecModule]:
    for ref in contributed():
        if (module := SpecModule(ref.distribution, ref.version, ref.module)).declares:
            yield module


SOURCES: list[Callable[[], Iterable[SpecModule]]] = [_entry_points, _contributed]
"""Functions that find modules of specs."""
KERNEL = SpecModule(DISTRIBUTION, own_version(), hookspecs.__name__)


def spec_modules() -> list[SpecModule]:
    """Every module of specs that is installed or contributed, the kernel's first. Imports none of them."""
    found = {one for source in SOURCES for one in source()} - {KERNEL}
    return [KERNEL, *sorted(found, key=lambda one: (one.distribution != DISTRIBUTION, one.distribution, one.module))]


class Specs(dict[str, HookSpec[..., Any]]):
    """The hooks that a run knows: the kernel's and Forge's own, those that the distributions of its plugins declare,
    and those that its plugins implement.

    Args:
        mistakes: takes a sentence for two hooks of one name, and for a module that can't be imported.
    """

    def __init__(self, mistakes: list[str]) -> None:
        super().__init__()
        self._mistakes = mistakes
        self._modules = spec_modules()
        self._loaded: dict[SpecModule, dict[str, HookSpec[..., Any]]] = {}
        self.required: set[str] = set()
        """Slots that must be filled: the kernel's, and those of the distributions and files of enabled plugins."""
        for module in self._modules:
            if module.distribution == DISTRIBUTION and not module.module.startswith(CONTRIB) and module.file:
                self._load(module)
        self._own = frozenset(self)
        self._require(KERNEL)

    def find(self, name: str) -> HookSpec[..., Any] | None:
        """A hook by its name; the modules that declare it are imported, and must be one alone."""
        if name not in self._own:
            for module in self._modules:
                if name in module.declares:
                    self._load(module)
        return self.get(name)

    def admit(self, plugin: EnabledPlugin) -> None:
        """Add what a plugin brings: the specs of its distribution and of its own file, and those that it implements."""
        for module in self._modules:
            if module.distribution == plugin.ref.distribution != DISTRIBUTION:
                self._load(module)
                self._require(module)
        if (home := sys.modules.get(plugin.cls.__module__)) and specs_of(home):
            own = SpecModule(plugin.ref.distribution, plugin.ref.version, home.__name__)
            self._load(own)
            self._require(own)
        for hook in sorted(implemented(plugin.cls)):
            self.find(hook)

    def _require(self, module: SpecModule) -> None:
        """Count the slots that a module says are required."""
        self.required |= {name for name, spec in self._loaded[module].items() if spec.required}

    def _load(self, module: SpecModule) -> None:
        if module in self._loaded:
            return
        self._loaded[module] = {}
        try:
            self._loaded[module] = module.load()
        except ConfigError as error:
            self._mistakes.append(str(error))
        for name, spec in self._loaded[module].items():
            if (first := self.setdefault(name, spec)) is not spec:
                other = next(one for one, specs in self._loaded.items() if specs.get(name) is first)
                places = [f"{one.label} ({place(its.function)})" for one, its in ((other, first), (module, spec))]
                self._mistakes.append(
                    f"Hook {name!r} is declared by {' and by '.join(places)}: uninstall one, or rename its hook."
                )
