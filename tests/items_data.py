"""A modality of the tests: scans, arrays of numbers in .npy files whose rows are patches."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_train import ConfigError, Job, Plugin, hookimpl
from forge_train_kit.modalities import Encoder, Grid, Item, ItemSource, Modality

FEATURES = 3


class Scan:
    """Modality with one feature vector for each `merge` patches, rounded up."""

    placeholder, features = "<scan>", FEATURES

    def __init__(self, name: str = "scan", merge: int = 1) -> None:
        self.name, self.merge = name, merge
        self.placeholder = f"<{name}>"

    def public(self) -> Mapping[str, Any]:
        return {"merge": self.merge}

    def measure(self, source: ItemSource) -> Grid:
        return self.read(source).grid

    def read(self, source: ItemSource) -> Item:
        with Path(source.path).open("rb") as file:
            file.seek(source.offset)
            content = file.read() if source.size is None else file.read(source.size)
        if content.startswith(b"broken"):
            raise ConfigError(f"{source}: a broken scan.")
        values = np.load(io.BytesIO(content))
        return Item(values, (1, 1, len(values)))

    def positions(self, grid: Grid) -> int:
        return -(-grid[2] // self.merge)

    def encoder(self, dim: int) -> Encoder:
        raise NotImplementedError


class Scans(Plugin):
    """Gives the modality."""

    api = (1, 0)

    @hookimpl
    def modalities(self, job: Job) -> Iterable[Modality]:
        return [Scan()]


def scan(number: int, patches: int) -> NDArray[Any]:
    """A scan that no other number has."""
    return np.arange(patches * FEATURES, dtype=np.float32).reshape(patches, FEATURES) + 1000 * number


def encoded(values: NDArray[Any]) -> bytes:
    """The content of its file."""
    stream = io.BytesIO()
    np.save(stream, values)
    return stream.getvalue()


def write_scans(folder: Path, sizes: Iterable[int]) -> list[str]:
    """Files of scans, and their names."""
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for number, patches in enumerate(sizes):
        names.append(f"{number}.npy")
        (folder / names[-1]).write_bytes(encoded(scan(number, patches)))
    return names


def write_records(path: Path, records: Iterable[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path
