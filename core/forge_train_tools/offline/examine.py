"""Whether a checkpoint is whole, and is what it says: every byte is read, and nothing of it is run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forge_train.ground.errors import ConfigError
from forge_train.storage import checkpoint, manifest, seal
from forge_train.storage.shards import check_shards


@dataclass(frozen=True)
class Examined:
    """What was found."""

    path: Path
    problem: str = ""
    """In a phrase; empty if there is none."""
    edited: tuple[str, ...] = ()
    """Files that may be edited, and were."""


def examine(path: Path) -> Examined:
    """Compare every file with the manifest, then look at the state, the index, and the description of every shard."""
    if problem := seal.check(path, contents=True):
        return Examined(path, problem)
    try:
        checkpoint.read_state(path)
        check_shards(path)
    except ConfigError as error:
        text = str(error).removeprefix(f"{path}: ").removeprefix(f"{path}/").rstrip(".")
        return Examined(path, text)
    return Examined(path, edited=tuple(manifest.edited(path)))
