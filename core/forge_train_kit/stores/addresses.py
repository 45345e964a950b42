"""Addresses of runs and checkpoints that lie elsewhere."""

from __future__ import annotations

from pathlib import Path

from forge_train.base.files import plain
from forge_train.run.run import is_checkpoint, is_run


def is_remote(address: str) -> bool:
    return "://" in address and not address.startswith("file://")


def address_of(place: str) -> str:
    """The address that a text means, empty for a path. A copied run, as in `checkpoint.mirror`, counts as one."""
    if is_remote(place):
        return place
    path = Path(plain(place)).absolute()
    try:
        copied = not is_run(path) and not is_checkpoint(path) and any(path.glob("checkpoints/step-*/manifest.json"))
    except OSError:  # a name that is too long
        return ""
    return str(path) if copied else ""
