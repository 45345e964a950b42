"""A plugin that could be enabled, of which nothing has been imported, and the place of a hook."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ..base.names import file_module, is_file, locate, split


@dataclass(frozen=True)
class PluginRef:
    """A plugin that could be enabled. Nothing of it has been imported."""

    name: str
    """Canonical: `-` is written `_`."""
    distribution: str
    version: str
    object: str
    """`package.module:Class` or `/folder/file.py:Class`; without the class where the only plugin there is meant."""

    @property
    def module(self) -> str:
        """The module's name, once it is imported."""
        module = split(self.object)[0]
        return file_module(module) if is_file(self.object) else module

    @property
    def label(self) -> str:
        """`'fp8' (forge-train 0.1.0)`, for messages."""
        return f"{self.name!r} ({self.distribution} {self.version})".replace(" )", ")")

    @property
    def file(self) -> Path | None:
        """The module's source file, found without importing anything of it."""
        return Path(split(self.object)[0]) if is_file(self.object) else locate(self.module)

    @property
    def covers(self) -> frozenset[str]:
        """Return what the class's transforms cover, read from literals such as `covers=("tp",)` in its source text."""
        name, text = split(self.object)[1], self._text
        own = text.partition(f"\nclass {name}(")[2].partition("\nclass ")[0] if name else text
        return frozenset(re.findall(r"\w+", " ".join(re.findall(r"\bcovers ?= ?\(([^)]*)\)", own))))

    @property
    def _text(self) -> str:
        return self.file.read_text(encoding="utf-8", errors="replace") if self.file and self.file.is_file() else ""


class HookOrigin(str):
    """A plugin, its hook and the place of its implementation in words; it also knows the names of both."""

    plugin: str
    hook: str

    def __new__(cls, text: str, plugin: str = "", hook: str = "") -> HookOrigin:  # copies are made of the text alone
        made = super().__new__(cls, text)
        made.plugin, made.hook = plugin, hook
        return made
