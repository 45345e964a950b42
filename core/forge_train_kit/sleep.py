"""Memory of a run that others use for a while: weights, gradients and optimizer state leave it, and come back.

Tensors stay the objects they are, with their views and ties; only the memory behind them goes. So hooks, compiled code
and the optimizer's keys stay true. On a CPU addresses stay too: whole pages are given back to the system.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from forge_train import ForgeError
from forge_train.base.format import format_list

if TYPE_CHECKING:
    from pathlib import Path

    from forge_train import Job, Model

Tag = Literal["weights", "gradients", "optimizer", "batches"]
TAGS: tuple[Tag, ...] = get_args(Tag)
_BLOCK = 1 << 24


class Asleep:
    """The tensors of a block of `asleep` that are away."""

    def __init__(self) -> None:
        self._away: list[_Away] = []

    @property
    def tags(self) -> set[str]:
        """Tags of which something is away."""
        return set().union(*(one.tags for one in self._away))

    @property
    def bytes(self) -> int:
        """Bytes of device memory that are given back."""
        return sum(one.bytes for one in self._away)

    def wake(self, *tags: Tag) -> None:
        """Bring back what has one of these tags; without tags, everything. What is awake stays as it is.

        Raises:
            ForgeError: if what was stored comes back with other bytes.
        """
        wanted = set(_known(tags or TAGS))
        staying = []
        try:
            while self._away:
                one = self._away.pop()
                if one.tags & wanted:
                    one.bring_back()
                else:
                    staying.append(one)
        finally:
            self._away += reversed(staying)


@contextlib.contextmanager
def asleep(
    job: Job,
    model: Model,
    optimizer: torch.optim.Optimizer | None = None,
    tags: Collection[Tag] = TAGS,
    folder: Path | None = None,
) -> Iterator[Asleep]:
    """Do without some of a run's tensors in a block, whose end brings them back, bit for bit.

    A plugin may do so in any hook, also between micro-batches or while a checkpoint is written. Each process does it
    for itself. What needs tensors that are away is an error: a forward pass, a step of the optimizer.

    Args:
        job: the run.
        model: its model; extra models of the run go along.
        optimizer: its optimizer.
        tags: which: `weights` (buffers too), `gradients`, `optimizer`, `batches` (of the step under way).
        folder: on a disk of this machine, for a file that no other process sees; by default the bytes go to host
            memory, which frees nothing where that is the device.

    Raises:
        ForgeError: for an unknown tag, a device without memory of its own and no folder, or a full disk; everything
            is then where it was.
    """
    chosen = set(_known(tags))
    if folder is None and job.device.type == "cpu":
        raise ForgeError("asleep: these tensors are in host memory already; name a folder on a disk for them.")
    sleeping = Asleep()
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(tempfile.TemporaryFile(dir=folder)) if folder else None
        except OSError as error:
            raise ForgeError(f"{folder}: {error.strerror}; tensors can't be put there.") from error
        stack.callback(sleeping.wake)
        for storage, theirs in _storages(job, model, optimizer, chosen):
            pages = _pages(storage)
            if pages or (pages is None and storage.resizable()):  # the rest is little, or another library's
                freed = len(pages) if pages else storage.nbytes()
                bring_back = _put_away(storage, pages, _Disk(file, str(folder)) if file else _Memory())
                sleeping._away.append(_Away(theirs, freed, bring_back))
        if job.device.type == "cuda":
            torch.cuda.empty_cache()
        for guard in _guards(job, model, optimizer, sleeping):
            stack.callback(guard.remove)
        yield sleeping


@dataclass(frozen=True)
class _Away:
    """A storage whose bytes are elsewhere."""

    tags: set[str]
    bytes: int
    bring_back: Callable[[], None]


def _put_away(storage: torch.UntypedStorage, pages: range | None, place: _Disk | _Memory) -> Callable[[], None]:
    """Copy the bytes of a storage, and give its memory back; gives what undoes it."""
    size = storage.nbytes()
    place.take(_bytes_of(storage))
    if pages is None:
        storage.resize_(0)
    elif ctypes.CDLL(None).madvise(ctypes.c_void_p(pages.start), ctypes.c_size_t(len(pages)), mmap.MADV_DONTNEED):
        raise ForgeError("asleep: the system does not take memory back (madvise); is it locked?")

    def back() -> None:
        if pages is None:
            storage.resize_(size)
        place.give(_bytes_of(storage))

    return back


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _view(data: Tensor) -> memoryview:
    """The bytes of a tensor on the CPU; torch's own way, `numpy()`, makes a storage that can't be resized any more."""
    return memoryview((ctypes.c_ubyte * len(data)).from_address(data.data_ptr())).cast("B")


class _Memory:
    """Bytes in host memory."""

    def take(self, data: Tensor) -> None:
        self._held: Tensor | None = data.to("cpu", copy=True)

    def give(self, into: Tensor) -> None:
        assert self._held is not None
        into.copy_(self._held)
        self._held = None


class _Disk:
    """Bytes in a file, from its present end on."""

    def __init__(self, file: Any, folder: str) -> None:
        self._file, self._folder = file.fileno(), folder

    def take(self, data: Tensor) -> None:
        """Raises:
        ForgeError: naming the folder, for a disk that is full or fails.
        """
        self._start, self._sum = os.lseek(self._file, 0, os.SEEK_END), 0
        try:
            for part in torch.split(data, _BLOCK):
                here = part.cpu()  # kept until it is written
                left = _view(here)
                self._sum = zlib.crc32(left, self._sum)
                while left:
                    left = left[os.write(self._file, left) :]
        except OSError as error:
            raise ForgeError(f"{self._folder}: {error.strerror}; tensors can't be put there.") from error

    def give(self, into: Tensor) -> None:
        found, at = 0, self._start
        for part in torch.split(into, _BLOCK):
            here = part if part.device.type == "cpu" else torch.empty(part.shape, dtype=torch.uint8)
            left = _view(here)
            while left and (count := os.preadv(self._file, [left], at)):
                left, at = left[count:], at + count
            found = zlib.crc32(_view(here), found)
            if here is not part:
                part.copy_(here)
        if found != self._sum:
            raise ForgeError(f"{self._folder}: gives back other bytes than it got. Resume from the last checkpoint.")


def _pages(storage: torch.UntypedStorage) -> range | None:
    """Addresses of the whole pages in a storage; None where the storage can only be emptied.

    Memory of the process's own can be given back page by page, and be used again at the same address.
    """
    if storage.device.type != "cpu" or sys.platform != "linux":
        return None
    size = mmap.PAGESIZE
    start, stop = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    return range(-(-start // size) * size, stop // size * size)


def _storages(
    job: Job, model: Model, optimizer: torch.optim.Optimizer | None, chosen: set[str]
) -> Iterator[tuple[torch.UntypedStorage, set[str]]]:
    """Each storage that only chosen tensors use, once, with their tags."""
    models = (model, *job.models.values())
    parts = [part for one in models for part in one.parts]
    parameters = [one for part in parts for one in part.parameters()]
    groups: Mapping[Tag, Iterable[Any]] = {
        "weights": (*parameters, *(one for part in parts for one in part.buffers())),
        "gradients": [one.grad for one in parameters],
        "optimizer": [] if optimizer is None else list(optimizer.state.values()),
        "batches": [[getattr(batch, one.name) for one in fields(batch)] for batch in job.step.batches],
    }
    found: dict[int, tuple[torch.UntypedStorage, set[str]]] = {}
    for tag, values in groups.items():
        for tensor in _tensors(values):
            storage = tensor.untyped_storage()
            if storage.nbytes() and not _seen_by_others(storage):
                found.setdefault(storage._cdata, (storage, set()))[1].add(tag)
    return (one for one in found.values() if one[1] <= chosen)


def _seen_by_others(storage: torch.UntypedStorage) -> bool:
    """True for memory of the CPU that another process or a device reads; of all other memory torch says that it is
    shared (2.13)."""
    return storage.device.type == "cpu" and (storage.is_shared() or storage.is_pinned())


def _tensors(value: Any) -> Iterator[Tensor]:
    """The plain tensors in anything."""
    if is_traceable_wrapper_subclass(value):
        yield from _tensors([getattr(value, name) for name in value.__tensor_flatten__()[0]])
    elif isinstance(value, Tensor):
        if value.device.type != "meta":
            yield value.detach()
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple, set)):
        for one in value:
            yield from _tensors(one)


def _guards(job: Job, model: Model, optimizer: torch.optim.Optimizer | None, sleeping: Asleep) -> Iterator[Any]:
    """Refuse what needs tensors that are away; gives handles of the hooks."""

    def forward(*_: Any) -> None:
        needed = {"weights", "gradients", "batches"} if torch.is_grad_enabled() else {"weights"}
        _refuse("forward pass", sleeping.tags & needed)

    for one in (model, *job.models.values()):
        for part in one.parts:
            yield part.register_forward_pre_hook(forward, prepend=True)
    if optimizer is not None:
        needed = {"weights", "gradients", "optimizer"}
        yield optimizer.register_step_pre_hook(lambda *_: _refuse("optimizer's step", sleeping.tags & needed))


def _refuse(what: str, away: set[str]) -> None:
    if away:
        raise ForgeError(f"asleep: the {what} needs {format_list(sorted(away))}; wake them first (Asleep.wake).")


def _known(tags: Collection[str]) -> Collection[str]:
    if unknown := sorted(set(tags) - set(TAGS)):
        raise ForgeError(f"{unknown[0]!r} is no tag of what can sleep; those are {format_list(TAGS)}.")
    return tags
