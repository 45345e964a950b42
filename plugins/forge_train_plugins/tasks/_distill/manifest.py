"""The manifest of a folder of log-probabilities. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_train import ConfigError
from forge_train.base.files import write_json
from forge_train.base.strict_json import parse_json

MANIFEST = "logits.json"


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder; empty where there is none.

    Raises:
        ConfigError: if the folder holds something else.
    """
    file = folder / MANIFEST
    try:
        if not file.exists() and (not folder.exists() or not any(folder.iterdir())):
            return {}
        content = parse_json(file.read_text(encoding="utf-8"))
        if {"made_of", "data", "covers", "files"} <= content.keys():
            return dict(content)
    except (OSError, ValueError, AttributeError):
        pass
    raise ConfigError(
        f"distill.stored: {folder} holds no log-probabilities of a teacher; name a new or an empty folder."
    )


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the manifest of a folder, whole or not at all."""
    folder.mkdir(exist_ok=True)
    write_json(folder / MANIFEST, content)


def lacks(content: Mapping[str, Any], split: str, count: int, seed: int) -> bool:
    """Return True if a folder lacks some of the first sequences of a split.

    Args:
        content: of the manifest.
        split: of the data.
        count: of the sequences; 0 for an epoch.
        seed: of the order in which they come.
    """
    covered = content.get("covers", {}).get(split)
    if covered is None or covered["whole"]:
        return covered is None
    return not count or covered["sequences"] < count or covered["seed"] not in (None, seed)
