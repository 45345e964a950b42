"""Metrics of a run, read in one pass, and read on while it trains."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from forge_train.base.errors import ConfigError
from forge_train.base.strict_json import COUNT, NOT_FINITE, check_text, loads
from forge_train.run.records import METRICS, METRICS_VERSION, read

from .curves import Array, Curve

METRICS_FILE = "metrics.jsonl"
"""Of a run's folder."""
LINES = 1 << 14
"""Lines that are parsed at once."""
LARGE = 64 << 20
"""Bytes of all files together from which on several processes read them."""
_NO_CURVE = {"version", "step", "timing", NOT_FINITE}
_NUMBERS: set[type] = {int, float, type(None)}


class Metrics:
    """The lines of a `metrics.jsonl`, as curves.

    Args:
        file: which need not be there.
        buckets: the most buckets of a curve.
    """

    def __init__(self, file: Path, buckets: int) -> None:
        self.file, self._buckets = file, buckets
        self._begin(None)

    def _begin(self, inode: int | None) -> None:
        self._inode, self._end = inode, 0
        self.curves: dict[str, Curve] = {}
        """By key; a key whose values are not numbers has none."""
        self.last: dict[str, Any] = {}
        """The newest line."""
        self.seconds = math.nan
        """Time in steps, without evaluations and checkpoints; nan if it is not known."""

    def read(self) -> bool:
        """Read the lines that are new; all, if the file is another one or has become shorter, as when a run resumes.

        Returns: whether there were any.

        Raises:
            ConfigError: for a damaged line; names it.
        """
        try:
            with self.file.open("rb") as lines:
                found = os.fstat(lines.fileno())
                if found.st_ino != self._inode or found.st_size < self._end:
                    self._begin(found.st_ino)
                before = self._end
                lines.seek(before)
                while chunk := list(islice(lines, LINES)):
                    whole = chunk if chunk[-1].endswith(b"\n") else chunk[:-1]
                    self._add(*_parsed(whole))
                    self._end += sum(map(len, whole))
                return self._end > before
        except FileNotFoundError:
            changed = self._inode is not None
            self._begin(None)
            return changed
        except (OSError, ValueError, ArithmeticError, LookupError, TypeError, RecursionError) as error:
            self._begin(None)
            raise ConfigError(f"{self.file}: can't be read: {_reason(self.file, error)}") from error

    def _add(self, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, Sequence[Any]]) -> None:
        if not rows:
            return
        steps = np.array(columns["step"], dtype=np.float64)
        before = float(self.last.get("step", 0))
        for key, values in columns.items():
            if key in _NO_CURVE or not set(map(type, values)) <= _NUMBERS:
                continue
            there = np.array([value is not None for value in values])
            numbers = _numbers([value for value in values if value is not None])
            if len(numbers):
                self.curves.setdefault(key, Curve(self._buckets)).add(steps[there], numbers)
            if key == "step_seconds" and len(numbers):
                spent = float((numbers * np.diff(steps, prepend=before)[there]).sum())
                self.seconds = spent if math.isnan(self.seconds) else self.seconds + spent
        self.last = dict(rows[-1])


def read_all(files: Sequence[Path], buckets: int) -> Iterator[Metrics | ConfigError]:
    """Read the metrics of runs, in order; an error stands in for those of a damaged file.

    Large files are read by as many processes as there are cores.

    Args:
        files: each a `metrics.jsonl`.
        buckets: the most buckets of a curve.
    """
    size = sum(file.stat().st_size for file in files if file.is_file())
    processes = min(
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, len(files)
    )
    if size < LARGE or processes < 2:
        yield from (_read(file, buckets) for file in files)
        return
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        yield from pool.map(partial(_read, buckets=buckets), files)


def _read(file: Path, buckets: int) -> Metrics | ConfigError:
    found = Metrics(file, buckets)
    try:
        found.read()
    except ConfigError as error:
        return ConfigError(str(error))  # without its cause, which another process can't be given
    return found


def _parsed(lines: Sequence[bytes]) -> tuple[list[dict[str, Any]], dict[str, Sequence[Any]]]:
    """Parse lines at once, which is several times as fast as one by one.

    Returns: the lines, and the values of each key, with None where it is missing.

    Raises:
        ValueError: or another error of Python, if one of them is not a line of metrics.
    """
    lines = [line for line in lines if line.strip()]
    text = b"[" + b",".join(lines) + b"]"
    rows: list[dict[str, Any]] = (loads if NOT_FINITE.encode() in text else json.loads)(text.decode("utf-8"))
    if b"\\u" in text:
        check_text(rows)
    if len(rows) != len(lines) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("there is more than one value in a line")
    columns = _columns(rows)
    shapes = dict.fromkeys(METRICS, _NUMBERS) | {"step": {int}, "loss": {int, float}}
    for key, kinds in shapes.items() if rows else ():
        values = columns.get(key, (None,))
        if not (found := set(map(type, values))) <= kinds:
            raise ValueError(f"a {key} is of another kind")
        if int in found and max(abs(value) for value in values if type(value) is int) >= COUNT.stop:
            raise ValueError(f"a {key} is too large")
    if rows and min(columns["step"]) < 0:
        raise ValueError("a step is negative")
    if max(filter(None, columns.get("version", ())), default=0) > METRICS_VERSION:
        raise ValueError("a line is of a newer version")
    return rows, columns


def _columns(rows: Sequence[dict[str, Any]]) -> dict[str, Sequence[Any]]:
    orders = list(dict.fromkeys(map(tuple, rows)))
    if len(orders) == 1:  # as in most files
        return dict(zip(orders[0], zip(*map(dict.values, rows), strict=True), strict=True))
    keys = dict.fromkeys(key for order in orders for key in order)
    return {key: [row.get(key) for row in rows] for key in keys}


def _reason(file: Path, error: Exception) -> str:
    """Describe a damaged file: its first damaged line, if there is one.

    Raises:
        ConfigError: if it was written by a newer forge.
    """
    try:
        for _ in read(file):
            pass
    except (OSError, ValueError) as named:
        return str(named)
    return str(error)


def _numbers(values: Sequence[float]) -> Array:
    try:
        return np.array(values, dtype=np.float64)
    except OverflowError:  # an integer of more than 308 digits
        return np.array([float(value) if abs(value) < 1e308 else math.inf for value in values])
