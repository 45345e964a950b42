"""Micro-batches from a stream of tokens: vectorised, without workers, resumable on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from forge_train import MASKED, Batch, ConfigError
from forge_train_data.permutation import permute

from .corpus import Split

if TYPE_CHECKING:
    from forge_train import Job

Int64 = NDArray[np.int64]

_AHEAD = 4096
"""Rows whose places are worked out at a time."""
_VALIDATION_SEED = 0x1E57


class TextLoader:
    """This rank's micro-batches of a split, without end.

    Row w of the stream is tokens `w × sequence … (w + 1) × sequence - 1`; fewer than `sequence` tokens at the very end
    are not used. Global sample index i is row i mod n in epoch i // n, through the epoch's permutation where the split
    is shuffled: every row once an epoch. Row r of global micro-batch g is sample g × micro_batch + r.

    With `isolate`, a row's tokens of different documents get different `document_ids` (0, 1, … within the row),
    `position_ids` count from the beginning of the document or of the row, whichever is later (so they stay below
    `sequence`), and a label that belongs to another document is masked. Without, the stream is one long text: no
    `document_ids`, no `position_ids`, and only the label after the stream's last token is masked.

    Args:
        split: the tokens.
        job: gives sequence, micro-batch, data-parallel rank and number of data ranks, and the device.
        seed: of the permutation, or None to keep the order.
        fixed: whether every epoch has the permutation of epoch 0.
        isolate: see above.
        corpus: identifies the content; a state saved with another one is refused.
    """

    def __init__(
        self, split: Split, job: Job, *, seed: int | None, fixed: bool = False, isolate: bool = True, corpus: str = ""
    ) -> None:
        train = job.config.train
        self._sequence, self._micro_batch = int(train.sequence), int(train.micro_batch)
        self._rank, self._ranks = job.dist.data_rank, job.dist.data_ranks
        self._seed, self._fixed, self._isolate, self._corpus = seed, fixed, isolate, corpus
        self._pin = torch.device(job.device).type == "cuda"
        self._tokens, self._last = split.tokens, len(split.tokens) - 1
        self.sequences = len(split.tokens) // self._sequence
        """Rows of the stream: the length of an epoch."""
        self._rows = split.tokens[: self.sequences * self._sequence].reshape(self.sequences, self._sequence)
        total = np.array([len(split.tokens)], np.int64)
        self._bounds = split.ends if isolate else total
        self._columns = np.arange(self._sequence, dtype=np.int64)
        self._position = 0
        self._planned: Iterator[Int64] = iter(())

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        rows = next(self._planned, None)
        if rows is None:
            self._planned = iter(self._plan())
            rows = next(self._planned)
        self._position += self._micro_batch * self._ranks
        return self._batch(rows)

    def state_dict(self) -> dict[str, Any]:
        """`sequences`: sequences that all ranks together have been given; `corpus`: what they were taken from."""
        return {"sequences": self._position, "corpus": self._corpus}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved place.

        Raises:
            ConfigError: the state belongs to another corpus.
        """
        if state.get("corpus", self._corpus) != self._corpus:
            raise ConfigError(
                "text: the corpus is not the one this state was saved with: the files' content, the tokenizer or "
                "text.held_out changed. Restore it, or start a new run from the checkpoint's weights (train.init_from)"
            )
        self._move(int(state["sequences"]))

    def skip(self, sequences: int) -> None:
        """Move on by that many sequences of the global stream (all ranks together)."""
        self._move(self._position + sequences)

    def _move(self, position: int) -> None:
        if position < 0:
            raise ValueError(f"the stream has no position {position}")
        self._position, self._planned = position, iter(())

    def _plan(self) -> Int64:
        """Rows of this rank's next micro-batches, `[micro-batches, micro_batch]`."""
        size = self._micro_batch
        first = np.arange(max(1, _AHEAD // size), dtype=np.int64) * (size * self._ranks)
        sample = self._position + self._rank * size + first[:, None] + np.arange(size, dtype=np.int64)
        epoch: Int64 = sample // self.sequences
        row: Int64 = sample % self.sequences
        if self._seed is None:
            return row
        if self._fixed:
            epoch = np.zeros_like(epoch)
        return permute(row.ravel(), epoch.ravel(), self.sequences, self._seed).reshape(sample.shape)

    def _batch(self, rows: Int64) -> Batch:
        start = rows * self._sequence
        stop = start + self._sequence
        inputs = self._rows[rows].astype(np.int64)
        labels = np.empty_like(inputs)
        labels[:, :-1] = inputs[:, 1:]
        labels[:, -1] = self._tokens[np.minimum(stop, self._last)]
        row, column = self._ends_within(start, stop)
        labels[row, column - 1] = MASKED
        if not self._isolate:
            return Batch(self._tensor(inputs), self._tensor(labels))
        inside = column < self._sequence
        row, column = row[inside], column[inside]
        document_ids, position_ids = np.zeros_like(inputs), np.empty_like(inputs)
        position_ids[:] = self._columns
        if len(row):
            document_ids[row, column] = 1
            np.cumsum(document_ids, axis=1, out=document_ids)
            begin = np.zeros_like(inputs)
            begin[row, column] = column
            position_ids -= np.maximum.accumulate(begin, axis=1)
        return Batch(self._tensor(inputs), self._tensor(labels), self._tensor(position_ids), self._tensor(document_ids))

    def _ends_within(self, start: Int64, stop: Int64) -> tuple[Int64, Int64]:
        """Row and column (1…sequence) of all document ends after a row's first token, up to and with the row's end."""
        low, high = self._bounds.searchsorted(start, "right"), self._bounds.searchsorted(stop, "right")
        count = high - low
        row = np.arange(len(count)).repeat(count)
        before = (count.cumsum() - count).repeat(count)
        return row, self._bounds[np.arange(len(row)) - before + low[row]] - start[row]

    def _tensor(self, array: Int64) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self._pin else tensor


def make_loader(
    split: Split, side: str, job: Job, *, shuffle: bool, isolate: bool, corpus: str, name: str
) -> TextLoader:
    """The loader of one side of a corpus.

    Held-out rows come in an order that is shuffled once and for all runs alike, so that a few batches are a fair sample
    and every evaluation sees the same ones.

    Raises:
        ConfigError: there is not one whole sequence.
    """
    sequence = job.config.train.sequence
    if len(split.tokens) < sequence:
        which = "training" if side == "train" else "held-out"
        advice = "give it more text, or lower train.sequence" + (
            ", or raise text.held_out, or do not evaluate (train.evaluate_every = 0)" if side != "train" else ""
        )
        raise ConfigError(
            f"text.path: the {which} part of {name} has {len(split.tokens)} tokens, "
            f"and one sequence takes {sequence} (train.sequence): {advice}"
        )
    if side == "train":
        return TextLoader(split, job, seed=job.seed if shuffle else None, isolate=isolate, corpus=corpus)
    return TextLoader(split, job, seed=_VALIDATION_SEED, fixed=True, isolate=isolate, corpus=corpus)
