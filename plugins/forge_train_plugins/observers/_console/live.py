"""The live view: one panel, drawn again when something happened, and never for more than 1 % of the time."""

from __future__ import annotations

import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import ROUNDED
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from forge_train_kit.format import format_count, format_duration, format_number, sparkline

if TYPE_CHECKING:
    from .board import Board

WIDEST = 100
ECHO = 3
"""Columns left free on the right: the terminal's echo of Ctrl-C must not begin a new line below the panel."""
NARROW = 64
"""Columns of the terminal below which figures stand one below the other."""
PAUSE = 100
"""A drawing that took one second is followed by that many without one."""
LABEL = 9
"""Columns of the labels."""


class LiveView:
    """A board on a terminal.

    Args:
        board: its content.
        console: where; by default the terminal of stdout.
    """

    def __init__(self, board: Board, console: Console | None = None) -> None:
        self.board = board
        self.console = console or Console(highlight=False)
        self._next = 0.0
        self._start()
        self._draw(force=True)
        self._next = 0.0  # the first drawing pays for what later ones find ready

    def _start(self) -> None:
        self._live = Live(console=self.console, auto_refresh=False)
        self._live.start()
        # rich hides the cursor, and a second Ctrl-C, which ends the process at once, would leave it hidden.
        self.console.show_cursor(True)

    def _show(self) -> None:
        self._live.update(render(self.board, self.console.width), refresh=True)

    def _stop(self) -> None:
        self._live.stop()

    def log(self) -> None:
        self._draw()

    def evaluate(self) -> None:
        self._draw()

    def resume(self, path: Path) -> None:
        self._draw()

    def save(self, path: Path) -> None:
        self._draw()

    def close(self) -> None:
        """Leave the last view on the screen."""
        try:
            self._draw(force=True)
        finally:
            self._stop()

    def _draw(self, *, force: bool = False) -> None:
        began = time.perf_counter()
        if began < self._next and not force:
            return
        try:
            self._show()
        except BaseException:
            self._stop()
            raise
        end = time.perf_counter()
        self._next = end + PAUSE * (end - began)


def render(board: Board, width: int) -> RenderableType:
    """The panel, for a terminal of that many columns."""
    width = max(min(width - ECHO, WIDEST), 1)
    inner = max(width - 4, 8)
    plugins = textwrap.wrap(" · ".join(board.plugins), inner, max_lines=2, placeholder=" …")
    head = [_line(board.name, "bold"), _line(board.size), *(_line(line, "dim") for line in plugins)]
    if board.phases:
        head.append(_line(" → ".join(board.phases), "dim"))
    body = [*head, Text(), _progress(board, inner), Text(), _figures(board, inner)]
    return Panel(Group(*body), title=_title(board), title_align="left", box=ROUNDED, border_style="dim", width=width)


def _title(board: Board) -> Text:
    state, colour = "training", "cyan"
    if board.failed:
        state, colour = "failed", "red"
    elif board.finished:
        state = board.finished.outcome
        colour = "green" if state == "done" else "yellow"
    return Text.assemble(("forge", "bold"), " ", (state, colour))


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _progress(board: Board, inner: int) -> RenderableType:
    words = f"{board.step:,}/{board.steps:,}"
    if board.finished or board.failed:
        words += f"  in {format_duration(board.elapsed)}"
    elif board.metrics:
        words += f"  {format_duration(board.left)} left"
    room = inner - len(words) - 2
    if room < 8:
        return _line(words)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(width=room)
    grid.add_column(no_wrap=True)
    colour = "red" if board.failed else "green" if board.step == board.steps else "cyan"
    bar = ProgressBar(total=max(board.steps, 1), completed=board.step, width=room, complete_style=colour)
    grid.add_row(bar, words)
    return grid


def _figures(board: Board, inner: int) -> RenderableType:
    metrics = board.metrics
    if not metrics:
        return _line("the first steps are on their way", "dim")
    rows = [_row("loss", _loss(board, inner - LABEL - 1))]
    if board.held_out:
        rows.append(_row("held out", _held_out(board)))
    figures = [
        ("grad norm", format_number(metrics["grad_norm"])),
        ("speed", f"{format_count(metrics['tokens_per_second'])} tokens/s"),
        ("lr", format_number(metrics["lr"])),
        ("memory", f"{metrics['memory_gib']:.2f} GiB"),
        ("saved", f"step {board.saved:,}" if board.saved is not None else "not yet"),
        ("a step", f"{format_number(metrics['step_seconds'])} s"),
    ]
    if metrics.get("mfu") is not None:
        figures.append(("mfu", f"{100 * metrics['mfu']:.1f} %"))
    rows += _pairs(figures) if inner >= NARROW else [_row(label, Text(value)) for label, value in figures]
    if board.extras:
        rows.append(
            _row("plugins", Text(" · ".join(f"{key} {format_number(value)}" for key, value in board.extras.items())))
        )
    return Group(*rows)


def _row(label: str, value: Text) -> Text:
    return Text.assemble((label.ljust(LABEL), "dim"), " ", value, no_wrap=True, overflow="ellipsis")


def _pairs(figures: list[tuple[str, str]]) -> list[Text]:
    """Two figures a line."""
    rows = []
    for first in range(0, len(figures), 2):
        pair = [
            Text.assemble((label.ljust(LABEL), "dim"), " ", value.ljust(20))
            for label, value in figures[first : first + 2]
        ]
        rows.append(Text("  ", no_wrap=True, overflow="ellipsis").join(pair))
    return rows


def _loss(board: Board, room: int) -> Text:
    value = format_number(board.metrics["loss"]).ljust(7)
    return Text.assemble((value, "bold"), " ", (sparkline(board.losses, room - len(value) - 1), "cyan"))


def _held_out(board: Board) -> Text:
    assert board.evaluation is not None
    (_, loss), *others = board.held_out
    text = Text.assemble((format_number(loss).ljust(7), "bold"), " ")
    text.append(" · ".join(f"{format_number(value)} {name}" for name, value in others))
    if board.evaluation.step != board.step:
        text.append(f"  at step {board.evaluation.step:,}", "dim")
    return text
