"""Checks that a checkpoint is whole and consistent: reads every byte, and runs nothing from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from forge_train.base.errors import ConfigError
from forge_train.checkpoint import checkpoint, seal
from forge_train.store.manifest import Sealed, hash_of, inspect
from forge_train.store.tensors import check_shards


@dataclass(frozen=True)
class Examined:
    """The result of an examination."""

    path: Path
    problem: str = ""
    """A phrase that describes the problem; empty if there is none."""
    edited: tuple[str, ...] = ()
    """Files that were edited and are allowed to be."""


def examine(path: Path) -> Examined:
    """Compare every file with the manifest, then check the state, the index, and the description of every shard."""
    if problem := seal.check(path, contents=True):
        return Examined(path, problem)
    try:
        checkpoint.read_state(path)
        check_shards(path)
    except ConfigError as error:
        text = str(error).removeprefix(f"{path}: ").removeprefix(f"{path}/").rstrip(".")
        return Examined(path, text)
    return Examined(path, edited=tuple(edited(path)))


def edited(path: Path) -> Iterator[str]:
    """Files of a whole checkpoint that were edited since it was saved, and may be."""
    sealed = inspect(path)
    if not isinstance(sealed, Sealed):
        return
    for name, entry in sealed.editable.items():
        if entry:
            with (path / name).open("rb") as file:
                if hash_of(file, sealed.algorithm) != entry.hash:
                    yield name
