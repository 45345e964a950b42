"""Hashes of tensors and of the sequences that a loader gives."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from forge_train.contract.batch import Batch
from forge_train.contract.protocols import Loader
from forge_train.mesh.tensors import local

from .recording import Fingerprint, Record


class WatchedLoader:
    """A loader that remembers what it gave, sequence by sequence, in `rows`."""

    def __init__(self, loader: Loader, rows: list[str], seen: Record) -> None:
        self._loader, self._seen = loader, seen
        self.rows = rows

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self._loader)
        ids = batch.document_ids
        self._seen.documents |= ids is not None and bool((ids != ids[:, :1]).any())
        for row in range(len(batch.inputs)):
            digest = hashlib.sha256()
            alone = batch.slice("batch", (row, row + 1))
            for name, tensor in sorted(alone.tensors().items()):
                own = unpadded(tensor) if name in alone.extras and alone.axes_of(name).sequence is None else tensor
                digest.update(f"{name}{hash_of(own)}".encode())
            self.rows.append(digest.hexdigest()[:16])
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # such as `on_model`, which a loader need not have

    def state_dict(self) -> dict[str, Any]:
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)

    def skip(self, sequences: int) -> None:
        self._loader.skip(sequences)


def fingerprint(tensor: Tensor) -> Fingerprint:
    """The piece of a tensor that lies here: a DTensor's by its mesh coordinates along the axes that shard it."""
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return "whole", hash_of(tensor)
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    names = mesh.mesh_dim_names or range(mesh.ndim)
    sharded = [
        f"{name}={place}"
        for name, place, kind in zip(names, mesh.get_coordinate(), placements, strict=True)
        if not kind.is_replicate() and mesh.size(list(names).index(name)) > 1
    ]
    return " ".join(sharded) or "whole", hash_of(local(tensor))


def unpadded(tensor: Tensor) -> Tensor:
    """An extra of one row, `[1, n, …]`, without the zeros at its end: they are as many as the rows beside it need."""
    if tensor.dim() < 2:
        return tensor
    filled = tensor[0].flatten(1).any(1).nonzero() if tensor.dim() > 2 else tensor[0].nonzero()
    return tensor[:, : int(filled.max()) + 1 if len(filled) else 0]


def hash_of(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]
