"""A run with `statistics`, on any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forge_train_tools.testing import run_forge


def train(folder: str, plugins: list[str], config: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What the last line says."""
    line = run_forge(["statistics", *plugins], config, folder=Path(folder), **more).metrics[-1]
    return {key: value for key, value in line.items() if key.startswith("statistics.") or key == "grad_norm"}
