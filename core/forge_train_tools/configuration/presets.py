"""The presets of installed distributions, found without importing anything."""

from __future__ import annotations

import importlib.metadata
import sys
from functools import lru_cache
from pathlib import Path

from forge_train.base.names import folder
from forge_train.registry.discovery import entry_points

PRESETS = "forge_train.presets"


def presets() -> dict[str, Path]:
    """Preset name → file, from every installed folder of presets; `base` only from forge's own."""
    found: dict[str, Path] = {}
    for point in sorted(entry_points(PRESETS), key=lambda point: (point.name != "forge", point.name)):
        root = folder(point.value)
        for file in sorted(root.glob("*.toml")) if root else ():
            if file.stem != "base" or point.name == "forge":
                found.setdefault(file.stem, file)
    return found


def base_preset() -> Path | None:
    """The preset beneath all others, which only forge's own distribution brings."""
    return _base(tuple(sys.path))


@lru_cache(maxsize=1)
def _base(path: tuple[str, ...]) -> Path | None:
    try:  # the entry points of one distribution take a tenth of the time of all
        points = importlib.metadata.distribution("forge-train").entry_points.select(group=PRESETS, name="forge")
    except importlib.metadata.PackageNotFoundError:
        return None
    roots = [root for point in points if (root := folder(point.value))]
    return next((file for root in roots if (file := root / "base.toml").is_file()), None)
