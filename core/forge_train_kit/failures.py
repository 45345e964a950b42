"""Failures, judged by what led to them."""

from __future__ import annotations

import re
import sys
import traceback
from dataclasses import asdict, replace
from typing import Literal

from forge_train.base.errors import Failure, FailureType, ForgeError, PluginError, Where, causes, describe

FailureKind = Literal["own", "lost", "timeout"]

_LOST = re.compile(
    r"closed by peer|reset by peer|Broken pipe|refused|connectFullMesh|can't join|remote process exited|not joined"
    r"|failed to recv|failed to send|Connection was likely closed|Socket Timeout"
)
_TIMEOUT = re.compile(r"Timed out waiting|timeout|timed out", re.IGNORECASE)
_TORCHS_OWN = re.compile(r"^\[\S+\]\s*|\. This is typically caused by.*", re.DOTALL)
"""The place in gloo's source, and its advice."""
_BLAMED = re.compile(r"in plugin '([^']+)'(?:[^,\n]*, hook (\w+))?")


def failure_of(error: BaseException, rank: int = 0) -> Failure:
    """Describe a failure by what is known about an exception and those that it was raised from.

    Args:
        error: the exception.
        rank: the rank that failed first.
    """
    known = (getattr(one, "where", Where()) for one in causes(error))
    where = next((one for one in known if one != Where()), Where())
    if not where.plugin and isinstance(error, PluginError) and (blamed := _BLAMED.search(str(error))):
        where = replace(where, plugin=blamed[1], hook=blamed[2] or "")
    phase = phase_of(error)
    message = in_words(error)
    return Failure(_type(error, phase, where.plugin), message, rank, phase, **asdict(where))


def in_words(error: BaseException) -> str:
    """Describe an error in a line; one of a collective by what it means for this rank, and by torch's words."""
    if isinstance(error, ForgeError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)[-1:]
    what = kind(error)
    if what == "own" or not frames or "/torch/distributed/" not in frames[0].filename.replace("\\", "/"):
        return describe(error)
    said = _TORCHS_OWN.sub("", describe(error).partition(": ")[2])
    began = "Another rank does not answer" if what == "timeout" else "The connection to another rank is lost"
    why = "it hangs, or its machine or the network is gone" if what == "timeout" else "it has ended, or its machine has"
    return f"{began}, in {frames[0].name}: {why} ({said})."


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
