"""A run on chats whose messages have weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forge_train_tools.testing import run_forge


def trained(folder: str, plugins: Sequence[str], config: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    run = run_forge(("sft", *plugins), config, steps=4, folder=Path(folder))
    return [(line["loss"], line["grad_norm"]) for line in run.metrics]
