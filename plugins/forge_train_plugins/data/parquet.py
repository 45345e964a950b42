"""The format Parquet: row groups are parts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from forge_train_kit.data.columns import rows, telling
from forge_train_kit.data.files import File
from forge_train_kit.data.formats import Part, Record, require

_ROWS = 1024
"""Rows decoded at a time."""
_BUFFER = 1 << 17
"""Bytes read at a time of each column. Otherwise pyarrow holds a whole row group, which may be gigabytes."""


class Parquet:
    """Columns are decoded in batches, and become Python values where a record's field is asked for."""

    def parts(self, file: File) -> Sequence[Part]:
        with _opened(file) as parquet:
            groups = [parquet.metadata.row_group(index) for index in range(parquet.num_row_groups)]
            return [
                Part(index, index + 1, group.total_byte_size, records=group.num_rows)
                for index, group in enumerate(groups)
            ]

    def read(self, file: File, part: Part) -> Iterator[tuple[str, Record]]:
        with _opened(file) as parquet:
            before = sum(parquet.metadata.row_group(index).num_rows for index in range(part.start))
            for group in range(part.start, part.stop):
                batches = parquet.iter_batches(_ROWS, row_groups=[group])
                while True:
                    with telling(file, "Parquet", f"row group {group + 1}"):
                        batch = next(batches, None)
                    if batch is None:
                        break
                    yield from rows(batch, before)
                    before += batch.num_rows


@contextlib.contextmanager
def _opened(file: File) -> Iterator[Any]:
    require("pyarrow", file.label)
    import pyarrow.parquet as pq

    with file.anywhere() as stream:
        with telling(file, "Parquet"):
            # Over a network many small reads would take longer than a row group takes memory.
            parquet = pq.ParquetFile(stream, pre_buffer=not file.local, buffer_size=_BUFFER if file.local else 0)
        with parquet:
            yield parquet
