"""Records as the rows of tensors in a safetensors file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from forge_train.base.errors import ConfigError
from forge_train.base.strict_json import dumps

from .columns import array_value, blocks, flushed, packed

_DTYPES: Mapping[str, tuple[np.dtype[Any], str]] = {"i": (np.dtype("<i8"), "I64"), "f": (np.dtype("<f4"), "F32")}
_LEFT_OUT = ("id",)


class Tensors:
    """A tensor for each field, with a row for each record: integers as int64, all others as fp32.

    The number of each row's record is in the tensor `record`; ids, which may be texts, are left out. Of an object,
    such as probabilities by class, each number is a tensor `field.key`. A number that a record lacks, such as `cut`, is
    0.

    Args:
        out: the file, for messages.
    """

    file, lists = "records.packed", False

    def __init__(self, out: Path) -> None:
        self._out = out
        self._shapes: dict[str, tuple[int, ...]] = {}

    def value(self, value: Any) -> Any:
        return array_value(value)

    def packed(self, line: Mapping[str, Any]) -> bytes:
        arrays = dict(self._arrays(line))
        for name, one in arrays.items():
            if one.shape != self._shapes.setdefault(name, one.shape):
                raise ConfigError(
                    f"--out: {self._out}: {name!r} has the shapes {list(self._shapes[name])} and {list(one.shape)}; a "
                    "tensor has one. Write .parquet or .jsonl."
                )
        return packed(arrays)

    def finished(self, file: Path) -> Path:
        count, kinds = 0, dict[str, tuple[str, tuple[int, ...]]]()
        for block in blocks(file):
            count += len(block)
            for line in block:
                for name, value in line.items():
                    kinds.setdefault(name, (value.dtype.kind, value.shape))
        kinds = dict(sorted(kinds.items(), key=lambda entry: entry[1][0] == "f"))  # wide ones first, which aligns all
        header, begins = dict[str, Any](), dict[str, int]()
        end = 0
        for name, (kind, shape) in kinds.items():
            dtype, label = _DTYPES[kind]
            size = count * int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            header[name] = {"dtype": label, "shape": [count, *shape], "data_offsets": [end, end + size]}
            begins[name], end = end, end + size
        text = dumps(header).encode()
        text += b" " * (-len(text) % 8)
        out = file.with_name("whole.safetensors")
        with out.open("wb") as data:
            data.write(len(text).to_bytes(8, "little") + text)
            data.truncate(8 + len(text) + end)
            for block in blocks(file):
                for name, (kind, shape) in kinds.items():
                    missing = np.zeros(shape)
                    rows = np.stack([line.get(name, missing) for line in block]).astype(_DTYPES[kind][0])
                    data.seek(8 + len(text) + begins[name])
                    data.write(rows.tobytes())
                    begins[name] += rows.nbytes
        return flushed(out)

    def _arrays(self, line: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        for name, value in line.items():
            if name in _LEFT_OUT:
                continue
            if isinstance(value, Mapping):
                yield from self._arrays({f"{name}.{key}": one for key, one in value.items()})
                continue
            try:
                array = np.asarray(array_value(value))
            except ValueError:  # lists of several lengths
                array = np.asarray(None)
            if array.dtype.kind not in "iufb":
                raise ConfigError(
                    f"--out: {self._out}: {name!r} is no number, and safetensors hold nothing else; choose other "
                    "--outputs, or write .parquet or .jsonl."
                )
            yield name, array_value(array.astype(np.int32) if array.dtype.kind in "bu" else array)
