"""Search for the rank that began a failure, and its description. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .launch import WorkerResult


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
