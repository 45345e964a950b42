"""Errors that forge raises on purpose; each knows the exit code it ends the command with."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


class ForgeError(Exception):
    """A failure with one clear message: shown without a traceback. `code` is the command's exit code."""

    code = 1


class ConfigError(ForgeError):
    """The user's input is wrong: an option, a key, a value, a plugin's name, a file, a composition that can't be."""

    code = 2


class PluginError(ForgeError):
    """A plugin broke the contract. The message names the plugin, its distribution and the hook."""


class DivergedError(ForgeError):
    """Training diverged and the policy said stop."""

    code = 3


def nearest(name: str, valid: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the valid name closest to `name`, or an empty string."""
    match = difflib.get_close_matches(name, list(valid), n=1)
    return f" Did you mean {match[0]!r}?" if match else ""


def describe(error: BaseException) -> str:
    """`Type: first line`, for a message about somebody else's exception."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def explain(error: BaseException, log: Path | None = None) -> str:
    """What a user is told of an error: a mistake's message, or a failure with its notes, its place and its log."""
    if isinstance(error, ForgeError):
        return str(error)
    import traceback

    lines = [describe(error), *(f"  {note}" for note in getattr(error, "__notes__", ()))]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    if frames:
        lines.append(f"  at {frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}")
    lines.append(f"The traceback is in {log}." if log else "FORGE_TRACEBACK=1 shows the traceback.")
    return "\n".join(lines)
