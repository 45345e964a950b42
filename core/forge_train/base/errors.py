"""Errors that forge raises on purpose, each with the command's exit code; and the description of a failure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import ContextDecorator
from dataclasses import asdict, dataclass
from typing import Any, Literal

FailureType = Literal[
    "configuration", "data", "checkpoint", "communication", "memory", "plugin", "diverged", "internal"
]
"""Category of a failure; `internal` is everything else."""


@dataclass(frozen=True)
class Where:
    """Context of a failure, as far as it is known."""

    plugin: str = ""
    hook: str = ""
    key: str = ""
    """Of the configuration."""


def locate(error: BaseException, **where: str) -> None:
    """Note on an exception what it is about (the fields of `Where`); what is known already stays."""
    known = {name: value for name, value in asdict(getattr(error, "where", Where())).items() if value}
    error.where = Where(**{**where, **known})  # type: ignore[attr-defined]


class ForgeError(Exception):
    """A failure with one clear message: shown without a traceback. `code` is the command's exit code, `type` what the
    failure means; a plugin's own subclass may set both."""

    code = 1
    type: FailureType = "internal"
    where = Where()

    def __init__(self, *arguments: object, **where: str) -> None:
        super().__init__(*arguments)
        if where:
            locate(self, **where)

    def __str__(self) -> str:
        return shortened(super().__str__())


class ConfigError(ForgeError):
    """The user's input is wrong: an option, a key, a value, a plugin's name, a file, a composition that can't be."""

    code = 2
    type = "configuration"


class PluginError(ForgeError):
    """A plugin broke the contract. The message names the plugin, its distribution and the hook."""

    type = "plugin"


class CommunicationError(ForgeError):
    """The processes of a run lost each other, or did not find each other."""

    type = "communication"


class DivergedError(ForgeError):
    """Training diverged and the policy said stop."""

    code = 3
    type = "diverged"


_LONG = re.compile(r"(?<!\w)(?P<quote>['\"])(?:(?!(?P=quote)).){200,}(?P=quote)|[^\s,]{400,}")
"""A quoted value, or anything without a space, that no sentence should repeat as a whole."""
_LINE = 2000


def shortened(text: str) -> str:
    """A message in which long values are cut in the middle, each with its number of characters."""
    lines = [_LONG.sub(lambda found: _cut(found[0], 80), line) for line in text.split("\n")]
    return "\n".join(_cut(line, _LINE) if len(line) > 2 * _LINE else line for line in lines)


def brief(text: str, size: int = 200) -> str:
    """A text, cut in the middle if it is longer."""
    return text if len(text) <= size else _cut(text, size // 2)


def _cut(text: str, kept: int) -> str:
    return f"{text[:kept]}…{text[-kept // 4 :]} ({len(text):,} characters)"


def nearest(name: str, valid: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the valid name closest to `name`, or one that it shortens, or that shortens it; or an
    empty string."""
    import difflib  # a listing does without

    names, initials = list(valid), "".join(word[:1] for word in name.split("_"))
    short = [one for one in names if (name and one.startswith(name)) or (one == initials and "_" in name)]
    match = difflib.get_close_matches(name, names, n=1) or sorted(short, key=len)
    return f" Did you mean {match[0]!r}?" if match else ""


def describe(error: BaseException) -> str:
    """`Type: first line`, for a message about somebody else's exception."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


@dataclass(frozen=True, slots=True)
class Problem:
    """A mistake in the configuration found by `check_config`: the dotted key, and what is wrong with it."""

    key: str
    message: str
    data: bool = False
    """True if only data is missing. Planning or showing a run needs none."""


INTERRUPTED = 75
"""Exit code of a run that was told to stop and can be continued."""


RunPhase = Literal[
    "configure", "start", "build", "load", "data", "forward", "step", "optimizer", "evaluate", "save", "loop"
]
"""Phase of a run; `loop` is the time between steps."""


class during(ContextDecorator):  # noqa: N801  # reads as a decorator
    """Assigns errors raised in the block, or in the function, to this phase of a run; the innermost phase wins."""

    def __init__(self, phase: RunPhase) -> None:
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
    """A `RunPhase`, or `backward`."""
    plugin: str = ""
    hook: str = ""
    key: str = ""
    """Of the configuration."""

    @classmethod
    def of(cls, error: BaseException, rank: int = 0) -> Failure:
        """Build it from what an exception says of itself; `forge_train_kit.failures` looks at its causes, too."""
        kind, message = (error.type, str(error)) if isinstance(error, ForgeError) else ("internal", describe(error))
        return cls(kind, message, rank, getattr(error, "phase", "start"), **asdict(getattr(error, "where", Where())))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that it was raised from."""
    one: BaseException | None = error
    while one is not None:
        yield one
        one = one.__cause__
