"""The lines of records, from what the ranks have found in their rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forge_train import Job

from .batches import Batches
from .forms import Form
from .outputs import PER_TOKEN, Collector
from .share import Row, Share

_Fields = dict[str, Any]


@dataclass
class Found:
    """Outputs of a row, and of its record only what the line needs: a record may be long."""

    id: Any
    cut: int
    tokens: int
    """Of the whole record."""
    outputs: dict[str, _Fields]
    """By name."""


class Lines:
    """Joins what pipeline stages have found in a row, and what was found in the windows of a record.

    Args:
        job: the job.
        share: the records.
        names: of the outputs, in the order in which they are written.
        form: the kind of file.
    """

    def __init__(self, job: Job, share: Share, names: Sequence[str], form: Form) -> None:
        self._job, self._share, self._names, self._form = job, share, names, form
        self._rows: dict[int, Found] = {}
        shared = [axis for axis in ("tp", "cp") if getattr(job.dist.layout, axis) > 1]
        self._leads = not any(job.dist.mesh("dense", axis).get_local_rank() for axis in shared)
        """Ranks that share a stage and its rows have the same outputs, and the first of them gives these."""

    def take(self, collector: Collector, batches: Batches, done: int) -> list[tuple[_Fields, Found]]:
        """The lines of records that are complete now, after the first `done`; on every rank.

        Args:
            collector: has the outputs of this rank's rows; it is emptied.
            batches: has these rows; likewise.
            done: number of records whose lines were taken before.
        """
        found = collector.found if self._leads else {}
        mine = {number: self._found(batches.taken[number], outputs) for number, outputs in found.items()}
        collector.found.clear()
        batches.taken.clear()
        for part in self._job.dist.gather_objects(mine):
            for number, one in part.items():
                self._rows.setdefault(number, one).outputs.update(one.outputs)
        records = range(done, self._share.records_before(batches.position))
        lines = [self._line(number) for number in records]
        self._rows = {n: one for n, one in self._rows.items() if n >= self._share.first_row(done + len(records))}
        return lines

    def _found(self, row: Row, outputs: dict[str, _Fields]) -> Found:
        if PER_TOKEN in outputs:
            outputs[PER_TOKEN] = {**_tokens(row), **outputs[PER_TOKEN]}
        if not self._share.windowed:  # else sums are still exact
            outputs = {name: self._values(fields) for name, fields in outputs.items()}
        return Found(row.record.id, row.record.cut, len(row.record.ids), outputs)

    def _line(self, number: int) -> tuple[_Fields, Found]:
        rows = [self._rows[row] for row in range(self._share.first_row(number), self._share.first_row(number + 1))]
        one = rows[0]
        fields = {name: value for output in self._names for name, value in _joined(rows, output)}
        line = {"record": number} | ({} if one.id is None else {"id": one.id}) | self._values(fields)
        return line | ({"cut": one.cut} if one.cut else {}), one

    def _values(self, fields: Mapping[str, Any]) -> _Fields:
        return {name: self._form.value(value) for name, value in fields.items()}


def _joined(rows: Sequence[Found], output: str) -> Iterator[tuple[str, Any]]:
    """The fields of an output: of several windows, numbers are added up, in fp64, and arrays follow each other."""
    for name, value in rows[0].outputs[output].items():
        if len(rows) == 1:
            yield name, value
            continue
        values = [row.outputs[output][name] for row in rows]
        yield name, np.concatenate(values) if np.ndim(value) else sum(values[1:], value)


def _tokens(row: Row) -> _Fields:
    """The tokens that are asked for in a row, and their places."""
    spans = [slice(*span) for span in row.asked]
    offsets = row.record.offsets
    places = (
        {} if offsets is None else {"token_offsets": np.concatenate([offsets[span] for span in spans] or [offsets[:0]])}
    )
    return {"token_ids": np.concatenate([row.record.ids[span] for span in spans] or [row.record.ids[:0]]), **places}
