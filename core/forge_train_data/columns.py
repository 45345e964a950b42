"""Record batches of Arrow as records. Imports pyarrow only when there is one to read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from forge_train import ConfigError

from .file import File


class _Columns:
    """The columns of a batch as Python values, each converted when it is first asked for."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self.names: list[str] = batch.schema.names
        self._values: dict[str, list[Any]] = {}

    def __getitem__(self, name: str) -> list[Any]:
        values = self._values.get(name)
        if values is None:
            if name not in self.names:
                raise KeyError(name)
            values = self._values[name] = self._batch.column(name).to_pylist()
        return values


class Row(Mapping[str, Any]):
    """One row; `dict(row)` has all of it."""

    __slots__ = ("_columns", "_index")

    def __init__(self, columns: _Columns, index: int) -> None:
        self._columns, self._index = columns, index

    def __getitem__(self, name: str) -> Any:
        return self._columns[name][self._index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns.names)

    def __len__(self) -> int:
        return len(self._columns.names)


def rows(batch: Any, before: int) -> Iterator[tuple[str, Row]]:
    """The records of a `pyarrow.RecordBatch`.

    Args:
        before: rows of the file that come before it.
    """
    columns = _Columns(batch)
    for index in range(batch.num_rows):
        yield f"row {before + index + 1}", Row(columns, index)


@contextlib.contextmanager
def telling(file: File, kind: str, place: str = "") -> Iterator[None]:
    """Turn errors of pyarrow into a `ConfigError` that names the file and the place."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, EOFError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ConfigError(f"{file.at(place)} is cut off, damaged or no {kind} file ({reason})") from error
