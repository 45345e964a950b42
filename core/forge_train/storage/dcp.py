"""Tensors on disk, by torch.distributed.checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor


def write(
    path: Path, tensors: Mapping[str, Tensor], *, alone: bool, contents: Callable[[str], Tensor] | None = None
) -> None:
    """Write tensors (this rank's shards of them) into a folder.

    Args:
        path: the folder.
        tensors: by name.
        alone: whether this is the only process.
        contents: gives a tensor by its name, when it is its turn; `tensors` then only describe them.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.state_dict_saver import save

    class Asking(DefaultSavePlanner):
        def lookup_object(self, index: MetadataIndex) -> object:
            return contents(index.fqn) if contents else super().lookup_object(index)

    # torch's writer (2.13) keeps every tensor of a file until the file is written: contents get one file each.
    writer = FileSystemWriter(path, single_file_per_rank=contents is None)
    with _plainly():
        save(dict(tensors), storage_writer=writer, planner=Asking(), no_dist=alone)


def read(path: Path, tensors: Mapping[str, Tensor], *, alone: bool) -> None:
    """Fill tensors (this rank's shards of them) in place."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    with _plainly():
        load(dict(tensors), storage_reader=FileSystemReader(path), no_dist=alone)


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
            failed = next(iter(error.failures.values()))[0]
            raise _refusal(failed) or failed from error


def _refusal(error: BaseException) -> OSError | None:
    """The disk's refusal behind an error: torch's zip writer raises another one while it handles that."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, OSError):
            return one
        waiting += [one.__cause__, one.__context__]
    return None


def read_one(path: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """One whole tensor, on the CPU."""
    tensor = torch.empty(shape, dtype=dtype)
    read(path, {name: tensor}, alone=True)
    return tensor
