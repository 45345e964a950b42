"""Description of a failure: its category, and where it happened."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import ContextDecorator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from .errors import FailureType, ForgeError, PluginError, Where, describe

FailureKind = Literal["own", "lost", "timeout"]
Phase = Literal[
    "configure", "start", "build", "load", "data", "forward", "step", "optimizer", "evaluate", "save", "loop"
]
"""Phase of a run; `loop` is the time between steps."""

_LOST = re.compile(
    r"closed by peer|reset by peer|Broken pipe|refused|connectFullMesh|can't join|remote process exited|not joined"
    r"|failed to recv|failed to send|Connection was likely closed|Socket Timeout"
)
_TIMEOUT = re.compile(r"Timed out waiting|timeout|timed out", re.IGNORECASE)
_BLAMED = re.compile(r"in plugin '([^']+)'(?:[^,\n]*, hook (\w+))?")


class during(ContextDecorator):  # noqa: N801  # reads as a decorator
    """Assigns errors raised in the block, or in the function, to this phase of a run; the innermost phase wins."""

    def __init__(self, phase: Phase) -> None:
        self._phase = phase

    def __enter__(self) -> during:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not hasattr(error, "phase"):
            error.phase = self._phase  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Failure:
    """Failure that ended a run, as recorded in outcome.json, events.jsonl and the output of `--json`."""

    type: FailureType
    message: str
    rank: int = 0
    """The rank that failed first."""
    phase: str = ""
    """A `Phase`, or `backward`."""
    plugin: str = ""
    hook: str = ""
    key: str = ""
    """Of the configuration."""

    @classmethod
    def of(cls, error: BaseException, rank: int = 0) -> Failure:
        """Build it from what is known about an exception."""
        known = (getattr(one, "where", Where()) for one in causes(error))
        where = next((one for one in known if one != Where()), Where())
        if not where.plugin and isinstance(error, PluginError) and (blamed := _BLAMED.search(str(error))):
            where = replace(where, plugin=blamed[1], hook=blamed[2] or "")
        phase = phase_of(error)
        message = str(error) if isinstance(error, ForgeError) else describe(error)
        return cls(_type(error, phase, where.plugin), message, rank, phase, **asdict(where))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def phase_of(error: BaseException) -> str:
    """The phase of a run that an error comes from: where its first cause was raised."""
    led = list(causes(error))
    torch = sys.modules.get("torch")
    if torch is not None:
        backward = torch.autograd.backward.__code__
        frames = (frame for one in led for frame, _ in traceback.walk_tb(one.__traceback__))
        if any(frame.f_code is backward for frame in frames):
            return "backward"
    return next((one.phase for one in reversed(led) if hasattr(one, "phase")), "start")


def kind(error: BaseException) -> FailureKind:
    """Classify an error: this rank's own, a timeout, or the loss of another rank."""
    for one in causes(error):
        text = str(one)
        if isinstance(one, RuntimeError) and _TIMEOUT.search(text):
            return "timeout"
        if isinstance(one, (RuntimeError, ConnectionError)) and _LOST.search(text):
            return "lost"
    return "own"


def _type(error: BaseException, phase: str, plugin: str) -> FailureType:
    for one in causes(error):
        if isinstance(one, ForgeError) and one.type != "internal":
            return one.type
        if isinstance(one, MemoryError) or type(one).__name__ == "OutOfMemoryError":
            return "memory"
    if kind(error) != "own":
        return "communication"
    if phase == "data":
        return "data"
    if plugin:
        return "plugin"
    return "checkpoint" if phase in ("save", "load") else "internal"


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that it was raised from."""
    one: BaseException | None = error
    while one is not None:
        yield one
        one = one.__cause__
