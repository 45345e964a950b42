"""Record batches of Arrow as records. Imports pyarrow only when there is one to read."""

from __future__ import annotations

import contextlib
import json
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
            column = self._batch.column(name)
            values = column.to_pylist()
            if _nested(column.type):
                values = [_json(value, column.type) for value in values]
            self._values[name] = values
        return values


def _nested(kind: Any) -> bool:
    return kind.num_fields > 0 or _is_json(kind)


def _is_json(kind: Any) -> bool:
    """Return True if values are JSON in a string: Arrow's extension type, which `datasets` uses for its `Json`."""
    return getattr(kind, "extension_name", "") == "arrow.json"


def _json(value: Any, kind: Any) -> Any:
    """A value as JSON has it: a struct loses keys that are null, which it has only because other rows have them."""
    import pyarrow as pa

    if value is None or not _nested(kind):
        return value
    if _is_json(kind):
        with contextlib.suppress(ValueError, RecursionError):  # Arrow never looks; as text it is refused with its place
            return json.loads(value)
        return value
    if pa.types.is_struct(kind):
        fields = {field.name: field.type for field in kind}
        return {name: _json(one, fields[name]) for name, one in value.items() if one is not None}
    if pa.types.is_map(kind):
        return {str(name): _json(one, kind.item_type) for name, one in value}
    return [_json(one, kind.value_type) for one in value] if isinstance(value, list) else value


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
