"""Micro-batches of one rank from the global sequence of samples; resumed in no time, on any number of ranks."""

from __future__ import annotations

import logging
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from forge_train.contract.batch import TOKENS, Batch

from ..losses import ANSWERS, LABEL_WEIGHTS
from .balance import spread
from .documents import Int64
from .items import RowItems, item_axes, padded
from .mismatched import with_mismatched
from .plugin import Prefetch
from .reading import Reader, Reading
from .rows import Arrays
from .stages import sequences
from .stream import Stream
from .workers import Task, Workers

if TYPE_CHECKING:
    from forge_train import Job

    from ..modalities import ItemSource
    from .balance import Costs
    from .items.notes import Noted

log = logging.getLogger("forge_train")

SOURCE = "source"
"""The target that says which source of a mixture each sequence is from, `[batch]` int64; -1 for padding."""

_AHEAD = 4096
"""Samples whose places are worked out at a time."""
_Read = tuple[Batch, tuple[str, ...]]
"""A micro-batch, and what was left out of it."""


class StreamLoader:
    """This rank's micro-batches, without end: row r of global micro-batch g is sample g × micro_batch + r.

    Where the stream predicts costs, the samples of each global batch are spread over micro-batches and ranks by them.
    Every rank works that out for itself, from numbers alone. Batches are counted from where the loader was put; with
    `train.batch_warmup`, samples are spread within as many as all sizes share.

    Workers read micro-batches ahead and give them in order: what is given, and the state, which is that of what was
    given, depend neither on their number nor on their kind.

    Args:
        stream: the samples.
        job: gives micro-batch, data-parallel rank and number of data ranks, and the device.
        prefetch: how they are read ahead, and what becomes of one that can't be read.
        on_skip: is told of the samples that were left out of a micro-batch when that is given.
        target: the name of `Arrays.sources` in a batch.
    """

    def __init__(
        self,
        stream: Stream,
        job: Job,
        prefetch: Prefetch | None = None,
        on_skip: Callable[[tuple[str, ...]], None] | None = None,
        *,
        target: str = SOURCE,
    ) -> None:
        self._stream, self._on_skip = stream, on_skip
        self._prefetch = prefetch or Prefetch()
        self.epoch: int | None = getattr(stream, "epoch", None)
        """Sequences of an epoch of training, over all ranks."""
        self._reader = Reader(stream, self._prefetch.on_error, _padding(stream, job))
        self._micro_batch = int(job.config.train.micro_batch)
        self._rank, self._ranks = job.dist.data_rank, job.dist.data_ranks
        self._costs: Callable[[Int64], Costs] | None = getattr(stream, "costs", None)
        self._window = math.gcd(*job.config.train.batches) if self._costs else 0
        pin = torch.device(job.device).type == "cuda"
        self._finish = partial(_finish, pin=pin, target=target, numbered=self._costs is not None)
        self._position = self._start = 0
        self._planned: Iterator[tuple[Int64, Int64]] | None = None
        self._workers: Workers[_Read] | None = None
        self._end: Callable[[], object] | None = None
        self._ahead: deque[Task[_Read]] = deque()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._prefetch.workers:
            self._read_ahead()
            batch, skipped = self._running().result(self._ahead[0])
            self._ahead.popleft()
            self._read_ahead()  # before the step: workers have its whole time
        else:
            batch, skipped = self._finish(self._reader(*self._next_places()))
        if skipped and self._on_skip:
            self._on_skip(skipped)
        self._position += self._micro_batch * self._ranks
        return batch

    def items(self, sequence: int) -> list[tuple[ItemSource, Noted, int]]:
        """The items of a sequence of the global stream, each with its place and its position; see `ItemRows`."""
        inside = getattr(self._stream, "inside", None)
        (place,) = self._stream.places(np.array([sequence], np.int64))
        return [] if inside is None else list(inside(place))

    def close(self) -> None:
        """End all workers; the next batch would start them again."""
        self._forget()
        if self._end is not None:
            self._end()
        self._workers = self._end = None

    def state_dict(self) -> dict[str, Any]:
        """`sequences`: sequences that all ranks together have been given; `begun`: how many of these are of a global
        batch that is spread and not given whole, if any; and what the stream keeps."""
        begun = {"begun": self._begun} if self._begun else {}
        return {"sequences": self._position, **begun, **self._stream.state_dict(self._position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved place.

        Raises:
            ConfigError: the state belongs to other content.
        """
        self._stream.load_state_dict(state, int(state["sequences"]))
        self._move(int(state["sequences"]), int(state.get("begun", 0)))

    def skip(self, sequences: int) -> None:
        """Move on by that many sequences of the global stream (all ranks together)."""
        self._move(self._position + sequences, self._begun + sequences)

    @property
    def _begun(self) -> int:
        """Sequences that were given of a global batch that is spread and not given whole."""
        return (self._position - self._start) % self._window if self._window else 0

    def _move(self, position: int, begun: int = 0) -> None:
        if position < 0:
            raise ValueError(f"the stream has no position {position}")
        self._position, self._start = position, position - begun
        self._forget()

    def _forget(self) -> None:
        """Forget what was read ahead."""
        if self._workers is not None:
            self._workers.drop(self._ahead)
        self._ahead.clear()
        self._planned = None

    def _read_ahead(self) -> None:
        workers = self._running()
        while len(self._ahead) < self._prefetch.workers * self._prefetch.batches:
            places, numbers = self._next_places()
            what = partial(self._reader.where, places[0], int(numbers[0]))
            self._ahead.append(workers.submit((places, numbers), what))

    def _running(self) -> Workers[_Read]:
        if self._workers is None:
            prefetch = self._prefetch
            self._workers = Workers(
                self._reader,
                self._finish,
                count=prefetch.workers,
                processes=prefetch.kind == "processes",
                deadline=prefetch.deadline,
                restart=prefetch.on_error == "skip",
            )
            self._end = weakref.finalize(self, self._workers.close)  # for whoever does not close the loader
        return self._workers

    def _next_places(self) -> tuple[Int64, Int64]:
        if self._planned is None:
            self._planned = self._plan(self._position)
        return next(self._planned)

    def _plan(self, position: int) -> Iterator[tuple[Int64, Int64]]:
        """Places `[micro_batch, …]` and numbers of this rank's next samples, micro-batch by micro-batch."""
        size = self._micro_batch
        if self._costs is not None:
            begun = self._begun
            yield from islice(self._balanced(position - begun), begun // (size * self._ranks), None)
        first = np.arange(max(1, _AHEAD // size), dtype=np.int64) * (size * self._ranks)
        while True:
            number = position + self._rank * size + first[:, None] + np.arange(size, dtype=np.int64)
            places = self._stream.places(number.ravel())
            yield from zip(places.reshape(*number.shape, *places.shape[1:]), number, strict=True)
            position += len(first) * size * self._ranks

    def _balanced(self, position: int) -> Iterator[tuple[Int64, Int64]]:
        """The same from the beginning of a global batch, each spread by cost."""
        assert self._costs is not None
        while True:
            number = position + np.arange(self._window, dtype=np.int64)
            places = self._stream.places(number)
            mine = spread(self._costs(places), self._micro_batch, self._ranks)[self._rank]
            yield from zip(places[mine], number[mine], strict=True)
            position += self._window


def _padding(stream: Stream, job: Job) -> tuple[int, int | None] | None:
    """The samples that count for nothing: from, and up to."""
    train = job.config.train
    if (epoch := getattr(stream, "epoch", None)) and getattr(train, "epochs", 0):
        together = getattr(stream, "together", 1)
        return -(-train.sequences_of(epoch) // together) * together, sequences(job)
    samples = getattr(stream, "samples", None)
    return None if samples is None else (samples, None)


def _finish(reading: Reading, *, pin: bool, target: str, numbered: bool) -> _Read:
    batch = as_batch(reading.arrays, pin=pin, target=target)
    if numbered and reading.numbers is not None:
        batch = replace(batch, sample_ids=torch.from_numpy(reading.numbers))
    return batch, reading.skipped


def warn_of_few(samples: int | None, job: Job) -> None:
    """Warn if fewer sequences are held out than an evaluation takes; None stands for enough."""
    train = job.config.train
    if samples is None or not train.evaluate_every or not job.dist.main:
        return
    if samples < (asked := train.evaluate_batches * train.global_batch):
        log.warning(
            "An evaluation takes %s sequences (train.evaluate_batches × train.global_batch), and %s held out. "
            "Each counts once, and padding fills the rest; hold more out for a surer loss.",
            f"{asked:,}",
            "only one sequence is" if samples == 1 else f"only {samples:,} sequences are",
        )


def example(job: Job, *, isolate: bool, items: Mapping[str, RowItems] | None = None) -> Batch:
    """A micro-batch of the shape that loaders give, of zeros: for `example_batch`.

    Args:
        isolate: whether documents of a row are kept apart.
        items: of each row, where rows have items.
    """
    train = job.config.train
    ids = np.zeros((train.micro_batch, train.sequence), np.int64)
    apart = ids if isolate else None
    each = (items,) * train.micro_batch if items else None
    return as_batch(Arrays(ids, ids, apart, apart, items=each), pin=False)


def as_batch(arrays: Arrays, *, pin: bool, target: str = SOURCE) -> Batch:
    """Rows as tensors, in pinned memory if they go to a CUDA device."""

    def tensor(array: NDArray[Any]) -> torch.Tensor:
        made = torch.from_numpy(array)
        return made.pin_memory() if pin else made

    positions, documents = arrays.position_ids, arrays.document_ids
    along = {LABEL_WEIGHTS: arrays.weights, ANSWERS: arrays.answers}
    targets = {target: arrays.sources, **along}
    items = padded(arrays.items) if arrays.items else {}
    made = Batch(
        tensor(arrays.inputs),
        tensor(arrays.labels),
        None if positions is None else tensor(positions),
        None if documents is None else tensor(documents),
        extras={name: tensor(one) for name, one in items.items()},
        targets={name: tensor(one) for name, one in targets.items() if one is not None},
        axes={name: TOKENS for name, one in along.items() if one is not None} | item_axes(arrays.items),
    )
    return made if arrays.mismatched is None else with_mismatched(made, as_batch(arrays.mismatched, pin=pin))
