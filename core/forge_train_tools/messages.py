"""Forge's messages on the screen: warnings, the progress of slow work, and the end of a run."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TextIO

from forge_train.base.errors import ForgeError

if TYPE_CHECKING:
    from forge_train.contract.events import Finished

LOG, PROGRESS = "forge_train", "forge_train.progress"
RED, YELLOW, BOLD, DIM = 31, 33, 1, 2
PAUSE = 0.5
"""Seconds between two drawings of a waiting command's line."""


def styled(text: str, code: int, stream: TextIO) -> str:
    """The text with an ANSI style, if the stream is a terminal; without colours if NO_COLOR is set."""
    plain = not stream.isatty() or (code in (RED, YELLOW) and os.environ.get("NO_COLOR"))
    return text if plain else f"\x1b[{code}m{text}\x1b[0m"


def folded(text: str, stream: TextIO) -> str:
    """The text, on a terminal folded between words; a long word, such as a path, stays whole to be copied."""
    if not stream.isatty():
        return text
    width = shutil.get_terminal_size().columns
    lines = [(line, " " * (len(line) - len(line.lstrip()))) for line in text.splitlines()]
    return "\n".join(
        textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        for line, indent in lines
    )


def say(text: str) -> None:
    """Say something that stays on the screen while a command works."""
    _say(folded(text, sys.stderr), sys.stderr)


def _say(text: str, stream: TextIO, end: str = "\n") -> None:
    with _LOCK:
        for line in _Waiting.shown:
            line.wipe()
        stream.write(f"{text}{end}")
        stream.flush()


_LOCK = threading.RLock()
"""Held by whoever writes on the screen."""


class _Waiting(logging.Handler):
    """The line of a command that works: what it does, which progress replaces, and for how long."""

    shown: ClassVar[list[_Waiting]] = []

    def __init__(self, text: str) -> None:
        super().__init__(logging.INFO)
        self.text, self.warnings = text, set[str]()
        self._began, self._ended, self._drawn = time.monotonic(), threading.Event(), 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()

    def begin(self) -> None:
        _Waiting.shown.append(self)
        self.draw()  # importing torch keeps the thread waiting for a second or two
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        self.wipe()
        _Waiting.shown.remove(self)

    def draw(self) -> None:
        """Write the line, and leave the cursor at its beginning."""
        from forge_train_kit.format import format_duration

        seconds = time.monotonic() - self._began
        line = f"{self.text} … {format_duration(seconds) if seconds >= 1 else ''}".rstrip()
        shown = line[: shutil.get_terminal_size().columns - 1]
        with _LOCK:
            sys.stderr.write(f"{styled(shown.ljust(self._drawn), DIM, sys.stderr)}\r")
            sys.stderr.flush()
            self._drawn = len(shown)

    def wipe(self) -> None:
        with _LOCK:
            if self._drawn:
                sys.stderr.write(f"{' ' * self._drawn}\r")
                sys.stderr.flush()
            self._drawn = 0

    def _run(self) -> None:
        while not self._ended.wait(PAUSE):
            self.draw()


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Show on a terminal that a command works and for how long, until the block ends.

    Args:
        text: what it does, until progress says more.
    """
    if not sys.stderr.isatty():
        yield
        return
    line, log = _Waiting(text), logging.getLogger(PROGRESS)
    log.addHandler(line)
    line.begin()
    try:
        yield
    finally:
        line.end()
        log.removeHandler(line)


def passing(text: str) -> None:
    """Say what is done now, to whoever is shown the progress."""
    if (shown := logging.getLogger(PROGRESS)).handlers:
        shown.info(text, extra={"passing": True})


class _Screen(logging.Handler):
    """Writes warnings to the current stderr, which a live view replaces by its own."""

    def emit(self, record: logging.LogRecord) -> None:
        colour = YELLOW if record.levelno < logging.ERROR else RED
        name = f"{record.levelname.capitalize()}:"
        text = folded(f"{name} {record.getMessage()}", sys.stderr)
        for line in _Waiting.shown:
            if text in line.warnings:  # the same model is built again, as by verify
                return
            line.warnings.add(text)
        text = text.replace(name, styled(name, colour, sys.stderr), 1)
        if record.exc_info and record.exc_info[1]:
            text += "\n" + "".join(traceback.format_exception(record.exc_info[1])).rstrip()
        _say(text, sys.stderr)


class _Caller(logging.Handler):
    """Hands records to the logging that the caller has configured, at the level that it has chosen."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.root.isEnabledFor(record.levelno):
            logging.root.callHandlers(record)


class _Progress(logging.Handler):
    """Progress: on a terminal one line that is overwritten, elsewhere only the final message."""

    def emit(self, record: logging.LogRecord) -> None:
        passing = getattr(record, "passing", False)
        if not sys.stdout.isatty():
            if not passing:
                _say(record.getMessage(), sys.stdout)
            return
        width = shutil.get_terminal_size().columns - 1
        text = styled(record.getMessage()[:width].ljust(width), DIM, sys.stdout)
        _say(f"\r{text}\r", sys.stdout, end="" if passing else "\n")


def show_progress() -> None:
    """Show the progress of slow work before the first step on the screen."""
    log = logging.getLogger(PROGRESS)
    log.propagate = False  # a run's log gets only its end
    if not log.handlers:
        log.addHandler(_Progress(logging.INFO))


def show_warnings() -> None:
    """Show forge's warnings on the screen; lesser messages go only into a run's log."""
    log = logging.getLogger(LOG)
    log.setLevel(logging.INFO)
    log.propagate = False
    if not any(isinstance(handler, _Screen) for handler in log.handlers):
        screen = _Screen(logging.WARNING)
        screen.addFilter(lambda record: getattr(record, "screen", True))
        log.addHandler(screen)


@contextmanager
def shown(*, progress: bool) -> Iterator[None]:
    """Show messages as the command line does for as long as the block lasts; then logging is as it was before.

    Where the caller has configured logging, warnings go there.

    Args:
        progress: whether to show the progress of slow work, too.
    """
    logs = [logging.getLogger(name) for name in (LOG, PROGRESS)]
    before = [(log, log.level, log.propagate, list(log.handlers)) for log in logs]
    if logging.root.handlers and logs[0].propagate:
        logs[0].addHandler(_Caller())
        logs[0].propagate = False
        logs[0].setLevel(logs[0].level or logging.INFO)
    else:
        show_warnings()
    if progress:
        show_progress()
    try:
        yield
    finally:
        for log, level, propagate, handlers in before:
            log.setLevel(level)
            log.propagate, log.handlers[:] = propagate, handlers


def show_end(finished: Finished) -> None:
    """Show what is to be said of a run that ended: that it had finished before, and the plugins' final messages."""
    if finished.reason and finished.outcome == "done":
        _say(f"{finished.run}: {finished.reason}", sys.stdout)
    for title, text in finished.closing:
        _say(f"\n{styled(title, BOLD, sys.stdout)}\n{text}", sys.stdout)


def explain(error: BaseException, log: Path | None = None) -> str:
    """Format an error for the user: a mistake's message, or a failure with its notes, its location and its log."""
    if isinstance(error, ForgeError):
        return str(error)
    from forge_train_kit.failures import in_words

    lines = [in_words(error), *(f"  {note}" for note in getattr(error, "__notes__", ()))]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    if frames:
        lines.append(f"  at {frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}")
    lines.append(f"The traceback is in {log}." if log else "FORGE_TRACEBACK=1 shows the traceback.")
    return "\n".join(lines)
