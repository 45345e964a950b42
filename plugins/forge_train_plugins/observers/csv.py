"""Tables for spreadsheets."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_train import Bins
from forge_train_kit.tracking import Tracker

if TYPE_CHECKING:
    from forge_train.run.run import Run


class CSV(Tracker):
    """Writes logged steps to `csv/metrics.csv` in the run's folder, and evaluations to `csv/evaluations.csv`.

    A row for each, and a column for each name. A column that comes later is empty in the rows before it. Histograms are
    left out.
    """

    api = (1, 0)

    def open(self, run: Run, config: Mapping[str, Any]) -> None:
        folder = run.dir / "csv"
        folder.mkdir(exist_ok=True)
        self._tables = _Table(folder / "metrics.csv"), _Table(folder / "evaluations.csv")

    def log(self, step: int, values: Mapping[str, float], histograms: Mapping[str, Bins]) -> None:
        self._tables["evaluation.loss" in values].add({"step": step, **values})

    def rewind(self, step: int) -> None:
        for table in self._tables:
            table.cut(step)


class _Table:
    """A file that is whole after every row.

    Args:
        file: which may be there from before.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        rows = self._rows()
        self._columns = list(rows[0]) if rows else []

    def add(self, row: Mapping[str, Any]) -> None:
        if more := [name for name in row if name not in self._columns]:
            self._write([*self._columns, *more], self._rows())
        with self._file.open("a", newline="", encoding="utf-8") as out:
            csv.DictWriter(out, self._columns).writerow(row)

    def cut(self, step: int) -> None:
        self._write(self._columns, [row for row in self._rows() if int(row["step"]) <= step])

    def _rows(self) -> list[dict[str, str]]:
        if not self._file.exists():
            return []
        with self._file.open(newline="", encoding="utf-8") as lines:
            return list(csv.DictReader(lines))

    def _write(self, columns: list[str], rows: list[dict[str, str]]) -> None:
        part = self._file.with_suffix(".partial")
        with part.open("w", newline="", encoding="utf-8") as out:
            writer = csv.DictWriter(out, columns)
            writer.writeheader()
            writer.writerows(rows)
        part.replace(self._file)
        self._columns = columns
