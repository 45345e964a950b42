"""Records as the rows of a Parquet file. Imports pyarrow when there is one to write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from forge_train.base.errors import ConfigError
from forge_train.base.strict_json import dumps

from .columns import array_value, blocks, flushed, packed


class Parquet:
    """A row for each record, and a column for each field; a field that a record lacks is null.

    Values of a field that have no common type, such as ids of which some are numbers, are texts: strings as they are,
    others as JSON.

    Args:
        out: the file, for messages.

    Raises:
        ConfigError: pyarrow is not installed.
    """

    file, lists = "records.packed", True

    def __init__(self, out: Path) -> None:
        if not find_spec("pyarrow"):
            raise ConfigError(f"--out: {out} needs pyarrow to be written: pip install 'forge-train[data]'.")

    def value(self, value: Any) -> Any:
        return array_value(value)

    def packed(self, line: Mapping[str, Any]) -> bytes:
        return packed(line)

    def finished(self, file: Path) -> Path:
        import pyarrow as pa
        import pyarrow.parquet as pq

        types: dict[str, Any] = {}
        for block in blocks(file):
            for name in dict.fromkeys(name for line in block for name in line):
                found = _type([line.get(name) for line in block])
                types[name] = _common(types[name], found) if name in types else found
        schema = pa.schema(list(types.items()))
        out = file.with_name("whole.parquet")
        with pq.ParquetWriter(out, schema) as writer:
            for block in blocks(file):
                columns = [_column([line.get(name) for line in block], kind) for name, kind in types.items()]
                writer.write_table(pa.Table.from_arrays(columns, schema=schema))
        return flushed(out)


def _type(values: Sequence[Any]) -> Any:
    """The type of some values of a column."""
    import pyarrow as pa

    arrays = [value for value in values if isinstance(value, np.ndarray)]
    if arrays:
        kind = pa.from_numpy_dtype(arrays[0].dtype)
        for _ in range(arrays[0].ndim):
            kind = pa.list_(kind)
        return kind
    try:
        return pa.array(values).type
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return pa.string()


def _common(one: Any, other: Any) -> Any:
    """The type that values of two types have in common."""
    import pyarrow as pa

    if one == other:
        return one
    schemas = [pa.schema([("value", kind)]) for kind in (one, other)]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return pa.string()


def _column(values: Sequence[Any], kind: Any) -> Any:
    import pyarrow as pa

    if pa.types.is_string(kind):
        values = [value if value is None or isinstance(value, str) else dumps(value) for value in values]
    return pa.array([_nested(value) for value in values], kind)


def _nested(value: Any) -> Any:
    """An array of one axis as it is, of others as a number or lists, which pyarrow takes."""
    return value.tolist() if isinstance(value, np.ndarray) and value.ndim != 1 else value
