"""What ranks do for test_deepseek.py: train a tiny DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forge_train_tools.testing import run_forge


def trained(
    folder: str, plugins: Sequence[str], config: Mapping[str, Any], steps: int, name: str, stop_at: int | None = None
) -> dict[str, Any]:
    run = run_forge(plugins, config, steps=steps, folder=Path(folder), name=name, stop_at=stop_at)
    return {"numbers": run.numbers, "run": str(run.run)}
