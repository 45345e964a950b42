"""Rows that are slow, broken, or deadly to who reads them; importable in a worker process."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from forge_train_kit.data.documents import Int64
from forge_train_kit.data.reading import stage
from forge_train_kit.data.rows import Arrays


class OddRows:
    """Row r is r, r, r, …; some of them are odd.

    Args:
        count: how many rows.
        odd: row → what happens when it is read: `broken`, `io`, `killed`, `hangs`.
        once: a file that says that it has happened; without one it happens each time.
        seconds: that every read takes.
        log: a file with a line for each read.
    """

    digest = "odd"

    def __init__(
        self,
        count: int,
        odd: dict[int, str] | None = None,
        *,
        once: Path | None = None,
        seconds: float = 0.0,
        log: Path | None = None,
        size: int = 4,
    ) -> None:
        self.count, self._odd, self._once, self._seconds, self._log = count, odd or {}, once, seconds, log
        self._size = size

    def read(self, rows: Int64) -> Arrays:
        if self._log is not None:
            with self._log.open("a") as file:
                file.write(f"{rows.tolist()}\n")
        time.sleep(self._seconds)
        for row in rows.tolist():
            if row in self._odd and not (self._once and self._once.exists()):
                if self._once:
                    self._once.touch()
                with stage("decode"):
                    getattr(self, self._odd[row])()
        ids = np.repeat(rows[:, None], self._size, axis=1)
        return Arrays(ids, ids.copy())

    def where(self, row: int) -> str:
        return f"odd.bin, document {row}"

    def broken(self) -> None:
        raise ValueError("not a picture")

    def io(self) -> None:
        raise OSError(5, "Input/output error")

    def killed(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def hangs(self) -> None:
        time.sleep(3600)


class Together:
    """Rows that can only be read by several readers at once."""

    digest = "together"
    count = 1000

    def __init__(self, readers: int) -> None:
        self._barrier: Any = threading.Barrier(readers)

    def read(self, rows: Int64) -> Arrays:
        self._barrier.wait(60)
        ids = np.repeat(rows[:, None], 4, axis=1)
        return Arrays(ids, ids.copy())

    def where(self, row: int) -> str:
        return str(row)
