"""Tensors read from disk, by torch.distributed.checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from .metadata import read_index


def read(path: Path, tensors: Mapping[str, Tensor], *, alone: bool) -> None:
    """Fill tensors (this rank's shards of them) in place. Nothing in the files is run."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.state_dict_loader import load

    class Reader(FileSystemReader):
        """Its index is not unpickled by torch, and names tensors only, which torch loads with `weights_only`."""

        def read_metadata(self) -> Metadata:
            return read_index(path)

    with _plainly():
        load(dict(tensors), storage_reader=Reader(path), no_dist=alone)


@contextmanager
def _plainly() -> Iterator[None]:
    """Without torch's warning that one process is alone; and what failed is raised itself, not inside of torch's
    `CheckpointException`, which is no `Exception`."""
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            failed = [failure for failure, _ in error.failures.values()]
            raise next((one for one in failed if isinstance(one, OSError)), failed[0]) from error


def read_one(path: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """One whole tensor, on the CPU."""
    tensor = torch.empty(shape, dtype=dtype)
    read(path, {name: tensor}, alone=True)
    return tensor
