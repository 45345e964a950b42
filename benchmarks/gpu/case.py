"""A case of the suite, and what it gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "wrong", "slow", "failed", "deadline", "not reached", "needs a device", "lacks a package"]
BAD: tuple[Status, ...] = ("wrong", "slow", "failed", "deadline", "not reached")
"""Statuses that make the suite exit with 1."""


@dataclass(frozen=True)
class Row:
    """One number and its bar."""

    name: str
    measured: str
    bar: str = "—"
    ok: bool = True


@dataclass(frozen=True)
class Size:
    """How large a case is, and where it runs."""

    device: str
    toy: bool
    """Whether shapes are those of a test on a CPU."""

    def choose(self, real: Any, toy: Any) -> Any:
        """One of two values."""
        return toy if self.toy else real


@dataclass(frozen=True)
class Case:
    """A function of this package, run in a process of its own: `(size, **arguments) → rows`."""

    name: str
    function: str
    """`module:function`."""
    arguments: dict[str, Any] = field(default_factory=dict)
    gpus: int = 0
    """Devices that it needs; 0 runs on a CPU too."""
    seconds: int = 60
    """Its deadline."""
    alone: bool = False
    """Whether nothing may run beside it, because it measures time or memory."""
    judges: Literal["numbers", "speed"] = "numbers"


class LacksError(Exception):
    """A package that the case needs is not installed; the message names it."""
