"""Micro-batches of one rank from texts that can't be entered by number."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from forge_train import Batch, ConfigError

from .loader import as_batch
from .plugin import Prefetch
from .rows import Arrays
from .streamed import StreamedRows
from .workers import Task, Workers

if TYPE_CHECKING:
    from forge_train import Job

_Taken = tuple[Arrays, dict[str, Any] | None]
"""Rows, and the place where the next ones begin."""
_Read = tuple[Batch, dict[str, Any] | None]


class StreamedLoader:
    """This rank's micro-batches of its own texts, without end.

    The place in the texts is each rank's own, and is not in `state_dict`, which is asked for in every step: the plugin
    keeps it (`gathered`, `scatter`). From `sequences` alone the loader goes on too: it reads all that was read before.

    A thread can read ahead: one, because a text is read after the one before it.

    Args:
        rows: of this rank.
        job: gives micro-batch, data-parallel rank and number of data ranks, and the device.
        prefetch: whether they are read ahead, and how many.
        key: the section that messages name.
    """

    def __init__(self, rows: StreamedRows, job: Job, prefetch: Prefetch, *, key: str) -> None:
        self._rows, self._dist, self._prefetch, self._key = rows, job.dist, prefetch, key
        self._micro_batch = int(job.config.train.micro_batch)
        self._finish = partial(_finish, pin=torch.device(job.device).type == "cuda")
        self._sequences = 0
        self._taken = 0
        """Rows that were given; `_place` is where the next ones begin."""
        self._place: dict[str, Any] | None = None
        self._workers: Workers[_Read] | None = None
        self._end: Callable[[], object] | None = None
        self._ahead: deque[Task[_Read]] = deque()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        self._seek()
        if self._prefetch.workers:
            self._read_ahead()
            batch, self._place = self._running().result(self._ahead[0])
            self._ahead.popleft()
            self._read_ahead()
        else:
            batch, self._place = self._finish(_take(self._rows, self._micro_batch))
        self._taken += self._micro_batch
        self._sequences += self._micro_batch * self._dist.data_ranks
        return batch

    def close(self) -> None:
        """End the thread; the next batch would start it again."""
        self._go_to(self._place, self._taken)
        if self._end is not None:
            self._end()
        self._workers = self._end = None

    def state_dict(self) -> dict[str, Any]:
        return {"sequences": self._sequences}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sequences = int(state["sequences"])

    def skip(self, sequences: int) -> None:
        self._sequences += sequences

    def gathered(self) -> dict[str, Any]:
        """The places of all ranks, on every one of them; all have to call it. JSON only."""
        self._seek()
        mine = {"taken": self._taken, "place": self._place}
        places = dict(self._dist.gather_objects((self._dist.data_rank, mine)))
        return {"places": [places[rank] for rank in range(self._dist.data_ranks)]}

    def scatter(self, state: Mapping[str, Any]) -> None:
        """Go to this rank's place.

        Raises:
            ConfigError: the places are of another number of ranks.
        """
        places, ranks = state["places"], self._dist.data_ranks
        if len(places) != ranks:
            raise ConfigError(
                f"{self._key}: a stream continues with the number of data-parallel ranks that it was saved with, "
                f"{len(places)}, and not with {ranks}; without {self._key}.streaming any number can."
            )
        mine = places[self._dist.data_rank]
        self._go_to(mine["place"], mine["taken"], anew=True)

    def _seek(self) -> None:
        """Go where `sequences` says."""
        wanted = self._sequences // self._dist.data_ranks
        if wanted == self._taken:
            return
        if wanted < self._taken:
            self._go_to(None, 0, anew=True)
        else:
            self._go_to(self._place, self._taken)
        self._rows.drop(wanted - self._taken)
        self._taken, self._place = wanted, self._rows.place()

    def _go_to(self, place: dict[str, Any] | None, taken: int, *, anew: bool = False) -> None:
        """Have the rows begin at a place, where they do not; what was read ahead is forgotten."""
        if self._ahead and self._workers is not None:
            self._workers.drop(self._ahead)
            self._workers.settle(self._ahead)  # the rows are the thread's until then
            self._ahead.clear()
            anew = True
        if anew:
            self._rows.go_to(place)
        self._place, self._taken = place, taken

    def _read_ahead(self) -> None:
        workers = self._running()
        while len(self._ahead) < self._prefetch.batches:
            self._ahead.append(workers.submit((), lambda: "a stream"))

    def _running(self) -> Workers[_Read]:
        if self._workers is None:
            self._workers = Workers(
                partial(_take, self._rows, self._micro_batch),
                self._finish,
                count=1,
                processes=False,
                deadline=self._prefetch.deadline,
                restart=False,
            )
            self._end = weakref.finalize(self, self._workers.close)
        return self._workers


def _take(rows: StreamedRows, count: int) -> _Taken:
    return rows.take(count), rows.place()


def _finish(taken: _Taken, *, pin: bool) -> _Read:
    return as_batch(taken[0], pin=pin), taken[1]
