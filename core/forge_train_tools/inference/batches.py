"""Micro-batches of a forward-only job. What is in them depends on the records alone, and not on the layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from forge_train import MASKED, Batch, Job
from forge_train.contract.batch import TOKENS
from forge_train_kit.data.items import RowItems, item_axes, padded

from .share import Row, Share

ROW, LAST, TEXT = "infer.row", "infer.last", "infer.text"
"""Targets: the number of each row, `[batch]` int64, -1 for rows that do not count; 1 at the last token, and at each
token, of a row's record, `[batch, sequence]` fp32."""
UNIT = 64
"""The length of rows is a multiple of this, which parallel layouts can divide, or the longest that the model takes."""
_ONCE = "a forward-only job reads its records once"


class Batches:
    """A loader of this rank's micro-batches, each of `size` consecutive rows with padding on their right.

    Micro-batch k of all goes to data-parallel rank k mod ranks; a rank for which there is none left gets rows that do
    not count.

    Args:
        share: the records.
        job: the job.
        size: rows of a micro-batch.
        longest: tokens that the model reads at once.
        pad: the id of padding.
        start: number of the first row, a multiple of `size`.
        documents: whether rows say where their padding begins, which tokens that see the future need.
        no_items: the items of a row without any, by its length, of a model that takes items.
    """

    def __init__(
        self,
        share: Share,
        job: Job,
        size: int,
        *,
        longest: int,
        pad: int,
        start: int,
        documents: bool,
        no_items: Callable[[int], Mapping[str, RowItems]] | None = None,
    ) -> None:
        self._size, self._longest, self._pad, self._documents = size, longest, pad, documents
        self._no_items = no_items
        self._rank, self._ranks = job.dist.data_rank, job.dist.data_ranks
        self._rows = share.rows(start)
        self.position = start
        """Number of the first row that no rank has been given."""
        self.taken: dict[int, Row] = {}
        """This rank's rows since `taken` was emptied, by number."""

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        mine: list[Row] = []
        for rank in range(self._ranks):
            found = list(islice(self._rows, self._size))
            if rank == self._rank:
                mine = [encode() for encode in found]
            self.position += len(found)
        self.taken |= {one.number: one for one in mine}
        return self._batch(mine)

    def state_dict(self) -> dict[str, Any]:
        return {"sequences": self.position}

    def skip(self, sequences: int) -> None:
        raise NotImplementedError(_ONCE)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError(_ONCE)

    def _batch(self, rows: Sequence[Row]) -> Batch:
        longest = max((one.stop - one.start for one in rows), default=1)
        shape = (self._size, min(-(-longest // UNIT) * UNIT, max(self._longest, longest)))
        inputs, labels = torch.full(shape, self._pad), torch.full(shape, MASKED)
        last, text, documents = torch.zeros(shape), torch.zeros(shape), torch.ones(shape, dtype=torch.int64)
        numbers = torch.full((self._size,), -1)
        for at, one in enumerate(rows):
            ids, size = torch.from_numpy(one.record.ids), one.stop - one.start
            inputs[at, :size] = ids[one.start : one.stop]
            for start, stop in one.asked:
                labels[at, start - 1 - one.start : stop - 1 - one.start] = ids[start:stop]
            last[at, size - 1], text[at, :size], documents[at, :size] = 1.0, 1.0, 0
            numbers[at] = one.number
        own: dict[str, Any] = {}
        if self._documents:
            places = torch.arange(shape[1]).expand(shape)
            sizes = (documents == 0).sum(1, keepdim=True)
            own = {"document_ids": documents, "position_ids": torch.where(documents == 0, places, places - sizes)}
        items = [] if self._no_items is None else [self._no_items(shape[1])] * self._size
        for at, one in enumerate(rows):
            if one.record.items is not None and one.record.items.placed:
                items[at] = one.record.items.read(shape[1])
        extras = {name: torch.from_numpy(array) for name, array in padded(items).items()} if items else {}
        batch = Batch(inputs, labels, extras=extras, axes=item_axes(items), **own).with_targets({ROW: numbers})
        return batch.with_targets({LAST: last, TEXT: text}, TOKENS)
