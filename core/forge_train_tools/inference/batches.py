"""Micro-batches of a forward-only job. What is in them depends on the records alone, and not on the layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from forge_train import MASKED, Batch, Job
from forge_train.contract.batch import TOKENS

from .records import Records, Tokens

RECORD, LAST, TEXT = "infer.record", "infer.last", "infer.text"
"""Targets: the number of each row's record, `[batch]` int64, -1 for rows that do not count; 1 at the last token, and at
each token, of a record, `[batch, sequence]` fp32."""
UNIT = 64
"""The length of rows is a multiple of this, which parallel layouts can divide, or the longest that the model takes."""
_ONCE = "a forward-only job reads its records once"


class Batches:
    """A loader of this rank's micro-batches, each of `size` consecutive records with padding on their right.

    Micro-batch k of all goes to data-parallel rank k mod ranks; a rank for which there is none left gets rows that do
    not count.

    Args:
        records: all of them.
        job: the job, with its tokenizer.
        tokenizer: of the model.
        size: records of a micro-batch.
        start: number of the first record, a multiple of `size`.
        documents: whether rows say where their padding begins, which tokens that see the future need.
    """

    def __init__(self, records: Records, job: Job, tokenizer: Any, size: int, start: int, *, documents: bool) -> None:
        self._records, self._tokenizer, self._size, self._documents = records, tokenizer, size, documents
        self._rank, self._ranks = job.dist.data_rank, job.dist.data_ranks
        self._read = records.read(start)
        self._position = start
        self.taken: dict[int, Tokens] = {}
        """This rank's records since `taken` was emptied, by number."""

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        mine: list[Tokens] = []
        for rank in range(self._ranks):
            found = [one for _, one in zip(range(self._size), self._read, strict=False)]
            if rank == self._rank:
                mine = [self._records.encoded(*one, self._tokenizer) for one in found]
            self._position += len(found)
        self.taken |= {one.number: one for one in mine}
        return self._batch(mine)

    def state_dict(self) -> dict[str, Any]:
        return {"sequences": self._position}

    def skip(self, sequences: int) -> None:
        raise NotImplementedError(_ONCE)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError(_ONCE)

    def _batch(self, rows: Sequence[Tokens]) -> Batch:
        longest = max((len(one.ids) for one in rows), default=1)
        length = min(-(-longest // UNIT) * UNIT, max(self._records.longest, longest))
        shape, pad = (self._size, length), self._tokenizer.end or 0
        inputs, labels = torch.full(shape, pad), torch.full(shape, MASKED)
        last, text, documents = torch.zeros(shape), torch.zeros(shape), torch.ones(shape, dtype=torch.int64)
        numbers = torch.full((self._size,), -1)
        for at, one in enumerate(rows):
            ids, size = torch.tensor(one.ids), len(one.ids)
            inputs[at, :size] = ids
            labels[at, one.given - 1 : size - 1] = ids[one.given :]
            last[at, size - 1], text[at, :size], documents[at, :size] = 1.0, 1.0, 0
            numbers[at] = one.number
        own: dict[str, Any] = {}
        if self._documents:
            places = torch.arange(length).expand(shape)
            sizes = (documents == 0).sum(1, keepdim=True)
            own = {"document_ids": documents, "position_ids": torch.where(documents == 0, places, places - sizes)}
        batch = Batch(inputs, labels, **own).with_targets({RECORD: numbers})
        return batch.with_targets({LAST: last, TEXT: text}, TOKENS)
