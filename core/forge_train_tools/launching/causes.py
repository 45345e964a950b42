"""Search for the rank that began a failure, and its description. Imports no torch."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from pathlib import Path

from .launch import WorkerResult

_CRASHES = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT")
"""Signals after which a rank has written its stacks."""
NO_PYTHON = ", in a thread that runs no Python"
"""As threads of gloo do. Our tests run again what ended so: see `only_rerun` in pyproject.toml."""


def by_cause(outcomes: Iterable[WorkerResult]) -> list[WorkerResult]:
    """The one that began it first: who was killed or hung, before who says so itself, before who only lost another."""
    order = ("hung", "killed", "own", "timeout", "lost")

    def place(outcome: WorkerResult) -> tuple[bool, bool, int, int]:
        final = outcome.code not in (0, 1)  # a mistake of the user's explains all that follows from it
        return (outcome.well, not final, order.index(outcome.kind), outcome.rank)

    return sorted(outcomes, key=place)


def as_words(outcome: WorkerResult) -> str:
    """The rest of a sentence that begins with the rank."""
    line = outcome.message.splitlines()[0] if outcome.message else "it does not say why."
    line = line if line.endswith(".") else f"{line}."
    return line if outcome.kind in ("killed", "hung") else f"failed: {line}"


def frames(stacks: str) -> list[str]:
    """`file:line, in function` of the main thread, innermost first, from what faulthandler wrote."""
    main = stacks.rpartition("Current thread ")[2] or stacks.rpartition("Thread ")[2]
    return [f"{file}:{line}, in {name}" for file, line, name in re.findall(r'File "(.+)", line (\d+) in (\S+)', main)]


def top(stacks: str) -> str:
    """A line with the innermost frame that is not torch's; empty where there are none."""
    found = frames(stacks)
    own = next((frame for frame in found if "/torch/" not in frame and "/threading.py" not in frame), "")
    return f"\n  at {own or found[0]}" if found else ""


def without_a_word(code: int, when: str, log: Path) -> str:
    """The rest of a sentence about a rank that left no outcome.

    Args:
        code: of its process; minus the number of the signal that ended it.
        when: in its run.
        log: its file.
    """
    if code >= 0:
        return f"ended with exit code {code} {when}. Its last words are in {log}."
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if name not in _CRASHES:
        why = "; the kernel does that where memory runs out (see dmesg)" if name == "SIGKILL" else ""
        return f"was killed by {name} {when}{why}. Its log is {log}."
    said = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    stacks = said.rpartition("Fatal Python error: ")[2]
    thread = "" if "Current thread " in stacks else NO_PYTHON
    where = f"{when}{thread}; the stacks of its threads are in its log.{top(stacks)}"
    return f"was killed by {name} {where}\nIts log is {log}."
