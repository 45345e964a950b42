"""A run of two ranks that each leave files."""

from __future__ import annotations

from pathlib import Path

from forge_train_tools.testing import run_forge


def train(folder: str) -> str:
    """The run's folder."""
    config = {"parallel.dp_replicate": 2, "profile.start": 1, "profile.steps": 1}
    return str(run_forge(["profile", "ddp"], config, steps=2, folder=Path(folder), name="two").run)
