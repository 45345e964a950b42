"""Files and records of scans, arrays of numbers in .npy files whose rows are patches, and runs that read them."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from forge_train import Batch, Job, Plugin, hookimpl
from forge_train_kit.data.tokenizers import open_tokenizer
from forge_train_kit.modalities import Modality
from forge_train_plugins.data.tokenizer import Tokenizer
from scans import FEATURES, Scan


class Scans(Plugin):
    """Gives the modality, whose items data reads."""

    api = (1, 0)
    requires = ("fusion",)

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


def job(
    *modalities: Scan, rank: int = 0, ranks: int = 1, gives: str = "features", path: str = "bytes", **train: Any
) -> Any:
    """A run of one process, or one rank of several, as the data sees it."""
    given = modalities or (Scan(),)

    def call(spec: Any, arguments: Any) -> Any:
        return open_tokenizer(path) if spec.name == "tokenizer" else [("scans", list(given))]

    section = Tokenizer.Config(path=path)
    return SimpleNamespace(
        hooks=SimpleNamespace(
            call=call,
            provider=lambda slot: slot,
            plugins={"tokenizer": Tokenizer(section)},
            gives=lambda slot: gives,
        ),
        config=SimpleNamespace(
            train=SimpleNamespace(
                **{"sequence": 24, "micro_batch": 2, "evaluate_every": 0}
                | {"batches": (train.get("micro_batch", 2) * ranks,), **train}
            ),
            sections={"tokenizer": section},
        ),
        dist=SimpleNamespace(data_rank=rank, data_ranks=ranks, main=True),
        device=torch.device("cpu"),
        seed=0,
    )


def same(one: Batch, other: Batch) -> bool:
    """Return True if two batches have the same bits."""
    mine, its = one.tensors(), other.tensors()
    return mine.keys() == its.keys() and all(
        mine[name].dtype == its[name].dtype and torch.equal(mine[name], its[name]) for name in mine
    )
