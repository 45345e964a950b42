"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from .strict_json import dumps


def write_json(file: Path, value: object) -> None:
    write_whole(file, dumps(value, indent=1) + "\n")


def write_whole(file: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all, also after a power cut."""
    part = file.with_name(f".{file.name}.partial")
    try:
        with part.open("w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        part.replace(file)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def remove_remains(checkpoints: Path) -> None:
    """Remove what a process left that was killed while it saved or pruned a checkpoint."""
    for left in checkpoints.glob(".step-*"):
        shutil.rmtree(left, ignore_errors=True)
