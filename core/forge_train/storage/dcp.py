"""Tensors read from disk, by torch.distributed.checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from .metadata import read_index
from .shards import reader


def read(path: Path, tensors: Mapping[str, Tensor], *, alone: bool) -> None:
    """Fill tensors (this rank's shards of them) in place. Nothing in the files is run.

    Raises:
        ConfigError: if what is in a file is not what the index says.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.futures import Future

    class Reader(FileSystemReader):
        """Neither its index nor its tensors are unpickled by torch."""

        def read_metadata(self) -> Metadata:
            return read_index(path)

        def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
            places = {item: self.storage_data[item.storage_index] for item in plan.items}
            files: dict[str, list[ReadItem]] = {}
            for item in sorted(plan.items, key=lambda item: places[item].offset):
                files.setdefault(places[item].relative_path, []).append(item)
            for name, items in files.items():
                with reader(path, name) as read_part:
                    for item in items:
                        begin = zip(item.storage_offsets, item.lengths, strict=True)
                        part = tuple(slice(offset, offset + length) for offset, length in begin)
                        target = planner.resolve_tensor(item).detach()
                        target.copy_(read_part(item.storage_index, places[item], part))
                        planner.commit_tensor(item, target)
            done: Future[None] = Future()
            done.set_result(None)
            return done

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
