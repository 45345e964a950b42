"""Micro-batches of one rank from the global sequence of samples; resumed in no time, on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from forge_train import Batch

from .documents import Int64
from .rows import Arrays
from .stream import Stream

if TYPE_CHECKING:
    from forge_train import Job

_AHEAD = 4096
"""Samples whose places are worked out at a time."""


class StreamLoader:
    """This rank's micro-batches, without end: row r of global micro-batch g is sample g × micro_batch + r.

    Args:
        stream: the samples.
        job: gives micro-batch, data-parallel rank and number of data ranks, and the device.
    """

    def __init__(self, stream: Stream, job: Job) -> None:
        self._stream = stream
        self._micro_batch = int(job.config.train.micro_batch)
        self._rank, self._ranks = job.dist.data_rank, job.dist.data_ranks
        self._pin = torch.device(job.device).type == "cuda"
        self._position = 0
        self._planned: Iterator[Int64] = iter(())

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        places = next(self._planned, None)
        if places is None:
            self._planned = iter(self._plan())
            places = next(self._planned)
        self._position += self._micro_batch * self._ranks
        return as_batch(self._stream.read(places), pin=self._pin)

    def state_dict(self) -> dict[str, Any]:
        """`sequences`: sequences that all ranks together have been given; and what the stream keeps."""
        return {"sequences": self._position, **self._stream.state_dict(self._position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved place.

        Raises:
            ConfigError: the state belongs to other content.
        """
        self._stream.load_state_dict(state, int(state["sequences"]))
        self._move(int(state["sequences"]))

    def skip(self, sequences: int) -> None:
        """Move on by that many sequences of the global stream (all ranks together)."""
        self._move(self._position + sequences)

    def _move(self, position: int) -> None:
        if position < 0:
            raise ValueError(f"the stream has no position {position}")
        self._position, self._planned = position, iter(())

    def _plan(self) -> Int64:
        """Places of this rank's next micro-batches, `[micro-batches, micro_batch, …]`."""
        size = self._micro_batch
        first = np.arange(max(1, _AHEAD // size), dtype=np.int64) * (size * self._ranks)
        sample = self._position + self._rank * size + first[:, None] + np.arange(size, dtype=np.int64)
        places = self._stream.places(sample.ravel())
        return places.reshape(*sample.shape, *places.shape[1:])


def example(job: Job, *, isolate: bool) -> Batch:
    """A micro-batch of the shape that loaders give, of zeros: for `example_batch`."""
    train = job.config.train
    ids = torch.zeros(train.micro_batch, train.sequence, dtype=torch.int64)
    return Batch(ids, ids, ids, ids) if isolate else Batch(ids, ids)


def as_batch(arrays: Arrays, *, pin: bool) -> Batch:
    """Rows as tensors, in pinned memory if they go to a CUDA device."""

    def tensor(array: Int64) -> torch.Tensor:
        made = torch.from_numpy(array)
        return made.pin_memory() if pin else made

    positions, documents = arrays.position_ids, arrays.document_ids
    return Batch(
        tensor(arrays.inputs),
        tensor(arrays.labels),
        None if positions is None else tensor(positions),
        None if documents is None else tensor(documents),
    )
