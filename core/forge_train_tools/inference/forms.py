"""The kinds of file that a forward-only job writes, by suffix."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from forge_train.base.errors import ConfigError
from forge_train.base.strict_json import dumps

from .parquet import Parquet
from .tensors import Tensors

Line = Mapping[str, Any]
"""A record's fields: numbers, texts, lists, objects, and numpy arrays."""


class Form(Protocol):
    """A kind of file. Records are appended one by one to a file beside it, from which it is made at the end: what is
    appended can be continued after a kill, and what is made depends on no kill."""

    file: str
    """Name of the file to append to."""
    lists: bool
    """True if it holds lists of many lengths."""

    def value(self, value: Any) -> Any:
        """A field's value as it is kept: of arrays and numbers of numpy, what this kind of file can hold."""
        ...

    def packed(self, line: Line) -> bytes:
        """A record as it is appended.

        Raises:
            ConfigError: this kind of file can't hold it.
        """
        ...

    def finished(self, file: Path) -> Path:
        """Make the file from what was appended, next to it, in bounded memory; on disk when this returns.

        Raises:
            ConfigError: this kind of file can't hold it.
        """
        ...


class JSONLines:
    """A line of JSON for each record."""

    file, lists = "records.jsonl", True

    def value(self, value: Any) -> Any:
        return shortest(value) if isinstance(value, (np.ndarray, np.generic)) else value

    def packed(self, line: Line) -> bytes:
        return f"{dumps({name: self.value(value) for name, value in line.items()})}\n".encode()

    def finished(self, file: Path) -> Path:
        return file


def form_of(out: Path) -> Form:
    """The kind of a file.

    Raises:
        ConfigError: for a suffix that is none, or a package that is not installed.
    """
    suffix = out.suffix.lower()
    if suffix in ("", ".jsonl"):
        return JSONLines()
    if suffix == ".parquet":
        return Parquet(out)
    if suffix == ".safetensors":
        return Tensors(out)
    raise ConfigError(f"--out: {out}: expected a name that ends with .jsonl, .parquet or .safetensors.")


def shortest(value: np.ndarray[Any, Any] | np.generic) -> Any:
    """Integers, or the shortest decimals that are the same fp32 numbers; in nested lists."""
    if np.issubdtype(value.dtype, np.integer):
        return value.tolist()
    array = np.asarray(value, np.float32)
    return np.array([float(str(one)) for one in array.ravel()], np.float64).reshape(array.shape).tolist()
