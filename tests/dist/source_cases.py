"""A mixture of two token files that differ in their ids, trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from forge_train_tools.testing import run_forge

IDS = {"low": (0, 60), "high": (90, 250)}
DOCUMENT = 33
"""Tokens of a document, its end included: one more than a row, so that both files are cut alike."""


def write(folder: Path, documents: int = 64) -> list[dict[str, Any]]:
    """The sources, as `mixture.sources` has them."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for name, (first, last) in IDS.items():
        ids = random.integers(first, last, documents * DOCUMENT).astype(np.uint16)
        ids[DOCUMENT - 1 :: DOCUMENT] = 256
        np.save(folder / f"{name}.npy", ids)
    return [{"path": str(folder / f"{name}.npy"), "name": name} for name in IDS]


def train(folder: str, plugins: list[str], config: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    """The lines of metrics."""
    run = run_forge(["mixture", *plugins], config, without=["text"], folder=Path(folder), **more)
    return run.numbers
