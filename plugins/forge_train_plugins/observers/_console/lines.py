"""Plain lines, for files and pipes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from forge_train_kit.format import format_count, format_duration, format_number

if TYPE_CHECKING:
    from .board import Board


class Lines:
    """One line for each thing that happens."""

    def __init__(self, board: Board) -> None:
        self.board = board
        _say(f"forge · {board.name} · {board.size}")
        _say(" · ".join([*board.plugins, *board.phases]))

    def log(self) -> None:
        board, metrics = self.board, self.board.metrics
        self._step(
            board.step,
            f"loss {format_number(metrics['loss'])}",
            f"grad norm {format_number(metrics['grad_norm'])}",
            f"lr {format_number(metrics['lr'])}",
            f"{format_count(metrics['tokens_per_second'])} tokens/s",
            f"{metrics['memory_gib']:.2f} GiB",
            *(f"{key} {format_number(value)}" for key, value in board.extras.items()),
            f"{format_duration(board.left)} left",
        )

    def evaluate(self) -> None:
        assert self.board.evaluation is not None
        found = ", ".join(f"{name} {format_number(value)}" for name, value in self.board.held_out)
        self._step(self.board.evaluation.step, f"held out: {found}")

    def resume(self, path: Path) -> None:
        self._step(self.board.step, f"resumed from {path}")

    def save(self, path: Path) -> None:
        self._step(self.board.saved or 0, f"saved {path.name}")

    def close(self) -> None:
        if self.board.finished:
            _say(summary(self.board))

    def _step(self, step: int, *parts: str) -> None:
        _say(" · ".join([f"step {step}/{self.board.steps}", *parts]))


def summary(board: Board) -> str:
    """The run in one line, at its end."""
    finished = board.finished
    assert finished is not None
    parts = [f"{finished.step:,} steps in {format_duration(board.elapsed)}"]
    if board.first:
        parts[0] = f"{finished.step - board.first:,} more steps in {format_duration(board.elapsed)}"
    if finished.loss is not None:
        parts.append(f"loss {format_number(finished.loss)}")
    if board.evaluation:
        parts.append("held out: " + ", ".join(f"{name} {format_number(value)}" for name, value in board.held_out))
    return " · ".join([finished.outcome, *parts, board.folder])


def _say(text: str) -> None:
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:  # `forge train | head`: the reader has seen enough, and the run continues
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
