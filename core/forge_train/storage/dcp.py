"""Tensors on disk, by torch.distributed.checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .metadata import read_index
from .shards import read_shard


def write(
    path: Path, tensors: Mapping[str, Tensor], *, alone: bool, contents: Callable[[str], Tensor] | None = None
) -> None:
    """Write tensors (this rank's shards of them) into a folder.

    Args:
        path: the folder.
        tensors: by name.
        alone: whether this is the only process.
        contents: gives a tensor by its name, when it is its turn; `tensors` then only describe them.

    Raises:
        OSError: on every rank, if the disk refuses one of them.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.state_dict_saver import save

    class Asking(DefaultSavePlanner):
        def lookup_object(self, index: MetadataIndex) -> object:
            return contents(index.fqn) if contents else super().lookup_object(index)

    class Writer(FileSystemWriter):
        """The refusal is found on its own rank: an exception that goes to another loses what caused it."""

        def write_data(self, *arguments: Any, **options: Any) -> Any:
            with _refusal_first():
                return super().write_data(*arguments, **options)

        def finish(self, *arguments: Any, **options: Any) -> None:
            with _refusal_first():
                super().finish(*arguments, **options)

    # torch's writer (2.13) keeps every tensor of a file until the file is written: contents get one file each.
    writer = Writer(path, single_file_per_rank=contents is None)
    with _plainly():
        save(dict(tensors), storage_writer=writer, planner=Asking(), no_dist=alone)


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
                with (path / name).open("rb") as file:
                    for item in items:
                        here = read_shard(path, file, item.storage_index, places[item])
                        begin = zip(item.storage_offsets, item.lengths, strict=True)
                        part = here[tuple(slice(offset, offset + length) for offset, length in begin)]
                        target = planner.resolve_tensor(item).detach()
                        target.copy_(part)
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


@contextmanager
def _refusal_first() -> Iterator[None]:
    """Raise the disk's refusal behind an error: torch's zip writer raises another one while it handles that."""
    try:
        yield
    except Exception as error:
        refusal = _refusal(error)
        if refusal is None:
            raise
        raise OSError(refusal.errno, refusal.strerror) from error


def _refusal(error: BaseException) -> OSError | None:
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
