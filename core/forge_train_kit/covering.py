"""Installed plugins that cover an axis, found without importing them."""

from __future__ import annotations

import re

from forge_train.base.names import PluginRef, split
from forge_train.registry.discovery import discover


def covering(axis: str) -> list[str]:
    """Return the names of the installed plugins whose transforms cover an axis, or `precision`."""
    return sorted(found.name for found in discover() if axis in covers(found))


def covers(ref: PluginRef) -> frozenset[str]:
    """Return what a class's transforms cover, read from literals such as `covers=("tp",)` in its source text."""
    name, file = split(ref.object)[1], ref.file
    text = file.read_text(encoding="utf-8", errors="replace") if file and file.is_file() else ""
    own = text.partition(f"\nclass {name}(")[2].partition("\nclass ")[0] if name else text
    return frozenset(re.findall(r"\w+", " ".join(re.findall(r"\bcovers ?= ?\(([^)]*)\)", own))))
