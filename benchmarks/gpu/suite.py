"""Runs cases, each in a process of its own with a deadline, and keeps what each gave."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .case import BAD, Case, Row, Size, Status

KEPT: tuple[Status, ...] = ("ok", "wrong", "slow")
"""Statuses that a rerun does not try again."""


@dataclass(frozen=True)
class Result:
    """What a case gave."""

    name: str
    status: Status
    seconds: float = 0.0
    rows: tuple[Row, ...] = ()
    told: str = ""
    """Why there are no rows."""


@dataclass
class Suite:
    """A run of the suite.

    Args:
        size: of all cases.
        gpus: devices here.
        folder: where results are kept; a rerun reads them.
        stamp: what results depend on: others are not taken over.
        environment: variables of the cases' processes.
        minutes: after which no further case is begun.
        beside: cases at once, of those that measure neither time nor memory.
    """

    size: Size
    gpus: int
    folder: Path
    stamp: dict[str, Any]
    environment: dict[str, str]
    minutes: float = 10.0
    beside: int = 1
    _began: float = field(default_factory=time.monotonic)

    def run(self, cases: list[Case]) -> Iterator[Result]:
        """Results in the order in which they come: first those that may run beside others."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(max(self.beside, 1)) as pool:
            yield from pool.map(self.one, [case for case in cases if not case.alone])
        yield from map(self.one, [case for case in cases if case.alone])

    def one(self, case: Case) -> Result:
        """A case's result: the kept one, or a new one."""
        file = self.folder / f"{case.name}.json"
        if (kept := self._kept(file)) is not None:
            return kept
        result = self._new(case)
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps({"stamp": self.stamp, **asdict(result)}, indent=1), encoding="utf-8")
        partial.replace(file)
        return result

    def _kept(self, file: Path) -> Result | None:
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if found.pop("stamp", None) != self.stamp or found["status"] not in KEPT:
            return None
        rows = tuple(Row(**row) for row in found.pop("rows"))
        return Result(**found, rows=rows)

    def _new(self, case: Case) -> Result:
        if case.gpus > self.gpus:
            needed = "a CUDA device" if case.gpus == 1 else f"{case.gpus} CUDA devices"
            return Result(case.name, "needs a device", told=f"needs {needed}; there are {self.gpus}")
        left = self.minutes * 60 - (time.monotonic() - self._began)
        if left < min(case.seconds, 20):
            return Result(
                case.name, "not reached", told=f"{self.minutes:g} minutes were over; the same command goes on"
            )
        return self._process(case, min(case.seconds, left))

    def _process(self, case: Case, seconds: float) -> Result:
        """Run a case; it and all that it started end at its deadline."""
        order = json.dumps({"function": case.function, "arguments": case.arguments, "size": asdict(self.size)})
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "gpu.one", order],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment,
            start_new_session=True,
        )
        try:
            out, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            _end(process)
            out, _ = process.communicate()
            return Result(
                case.name, "deadline", time.monotonic() - began, told=_tail(out, f"{seconds:.0f} s were over")
            )
        spent = time.monotonic() - began
        answer = next((json.loads(line[7:]) for line in out.splitlines() if line.startswith("RESULT ")), None)
        if answer is None:
            return Result(case.name, "failed", spent, told=_tail(out, f"exit code {process.returncode}"))
        if answer["lacks"]:
            return Result(case.name, "lacks a package", spent, told=answer["lacks"])
        rows = tuple(Row(**row) for row in answer["rows"])
        bad: Status = "slow" if case.judges == "speed" else "wrong"
        if not rows:
            return Result(case.name, "failed", spent, told="it gave no number")
        return Result(case.name, "ok" if all(row.ok for row in rows) else bad, spent, rows)


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _tail(out: str, first: str) -> str:
    """The last lines, and before them the last exception's, which many lines may follow."""
    lines = out.strip().splitlines()
    raised = [line for line in lines[:-12] if re.match(r"[\w.]+(Error|Exception)\b.*: ", line)]
    return "\n".join([first, *raised[-1:], *lines[-12:]])


def failed(results: list[Result]) -> bool:
    """Whether the suite's exit code is 1."""
    return any(result.status in BAD for result in results)
