"""Waits have a line on a terminal, warnings are folded between words, and narrow tables stay readable."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import click
import pytest

from forge_command import on_terminal, typed
from forge_train_cli import screen
from forge_train_tools import messages
from forge_train_tools.messages import RED, folded, passing, say, show_warnings, styled, waiting

pytestmark = pytest.mark.unit


class Terminal(io.StringIO):
    """A stream that calls itself a terminal."""

    def isatty(self) -> bool:
        return True


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch, columns: int = 40) -> Iterator[Terminal]:
    """stdout and stderr are a terminal, and messages go there."""
    shown = Terminal()
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(messages, "PAUSE", 1e-3)
    logs = [logging.getLogger(name) for name in (messages.LOG, messages.PROGRESS)]
    before = [(log, log.level, log.propagate, list(log.handlers)) for log in logs]
    for log in logs:
        log.handlers.clear()
    show_warnings()
    try:
        with redirect_stdout(shown), redirect_stderr(shown):
            yield shown
    finally:
        for log, level, propagate, handlers in before:
            log.setLevel(level)
            log.propagate, log.handlers[:] = propagate, handlers


def lines(shown: str) -> list[str]:
    """What is left on a screen, line by line."""
    screen: list[str] = []
    for line in click.unstyle(shown).split("\n"):
        kept = ""
        for part in line.split("\r"):
            kept = part + kept[len(part) :]
        screen.append(kept.rstrip())
    return screen


def test_a_wait_has_a_line_that_progress_replaces_and_that_is_gone_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as shown:
        with waiting("starting"):
            assert lines(shown.getvalue()) == ["starting …"]
            passing("two processes")
            while "two processes" not in shown.getvalue():  # drawn by a thread
                pass
            say("a line that stays")
        assert lines(shown.getvalue()) == ["a line that stays", ""]
        passing("nobody waits any more")
        assert "nobody" not in shown.getvalue()


def test_a_wait_says_its_seconds_and_is_no_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as shown:
        line = messages._Waiting("importing a folder with quite a long name")
        line._began -= 75
        line.draw()
        assert lines(shown.getvalue()) == ["importing a folder with quite a long na"]
        monkeypatch.setenv("COLUMNS", "80")
        line.draw()
        assert lines(shown.getvalue())[0].endswith(" … 1:15")


def test_without_a_terminal_a_wait_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with waiting("starting"):
        passing("two processes")
    assert capsys.readouterr() == ("", "")


def test_a_warning_is_folded_between_words_and_said_once_while_a_command_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as shown:
        log = logging.getLogger(messages.LOG)
        with waiting("comparing"):
            for _ in range(2):
                log.warning("only 35 sequences are held out of /a/folder/whose/name/is/long/and/stays/whole")
        assert lines(shown.getvalue()) == [
            "Warning: only 35 sequences are held out",
            "of",
            "/a/folder/whose/name/is/long/and/stays/whole",
            "",
        ]
        log.warning("again")
        log.warning("again")
        assert shown.getvalue().count("again") == 2


def test_a_folded_text_keeps_its_lines_and_their_indents(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as shown:
        text = "first\n  second, which is longer than forty columns are"
        assert folded(text, shown) == "first\n  second, which is longer than forty\n  columns are"
        assert folded(text, io.StringIO()) == text


@pytest.mark.slow
def test_no_color_leaves_no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as shown:
        assert styled("Error:", RED, shown) == "\x1b[31mError:\x1b[0m"
        monkeypatch.setenv("NO_COLOR", "1")
        assert styled("Error:", RED, shown) == "Error:"
        shown = on_terminal("train", "-p", "xyzzy", columns=80)
        assert "Error: --plugins" in shown
        assert not re.search(r"\x1b\[[0-9;]*3\d", shown)


ROWS = [
    ("✓", "initial weights", "0", "1.0e-05", "parameters that start differently"),
    ("✗", "loss", "1", "0", "relative"),
]


def test_a_table_that_does_not_fit_has_its_cells_below_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as shown:
        screen.table(("", "", "worst", "allowed", ""), ROWS, right=(2, 3))
        assert lines(shown.getvalue()) == [
            "  ✓ initial weights",
            "    worst    0",
            "    allowed  1.0e-05",
            "    parameters that start differently",
            "  ✗ loss",
            "    worst    1",
            "    allowed  0",
            "    relative",
            "",
        ]


def test_a_table_that_fits_cuts_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch, 64) as shown:
        screen.table(("", "", "worst", "allowed", ""), ROWS, right=(2, 3))
        assert lines(shown.getvalue()) == [
            "                      worst  allowed",
            "  ✓  initial weights      0  1.0e-05  parameters that start",
            "                                      differently",
            "  ✗  loss                 1        0  relative",
            "",
        ]


def test_help_fits_a_narrow_terminal() -> None:
    shown = typed("--help", columns=40)
    assert max(map(len, shown)) <= 40
