"""Trains the quickstart and draws its screen into docs/assets/screen.svg, as rich exports it.

    python docs/screen.py

The view is that of the `console` plugin, two thirds into a real run; nothing in it is made up.
"""

from __future__ import annotations

import copy
import io
import sys
import tempfile
from pathlib import Path

from rich.console import Console as Terminal
from rich.text import Text

from forge_train import Evaluation, Job, LogRecord, Model, Plugin, hookimpl
from forge_train.config.layers import Request
from forge_train.contract.protocols import CheckpointEvent
from forge_train.engine import train
from forge_train.registry.setup import resolve
from forge_train_plugins.observers._console.board import Board
from forge_train_plugins.observers._console.live import render

TARGET = Path(__file__).parent / "assets" / "screen.svg"
COLUMNS = 92
MOMENT = 2 / 3
"""The share of the run that is done in the picture."""


class Camera(Plugin):
    """Keeps what the console shows at one moment of a run."""

    api = (1, 0)
    _picture: str = ""

    @hookimpl
    def on_start(self, job: Job, model: Model) -> None:
        self._board = Board.of(job, model)
        self._board.name = "quickstart"

    @hookimpl
    def on_log(self, record: LogRecord) -> None:
        self._board.log(record)
        if not self._picture and record.step >= MOMENT * record.steps and self._board.evaluation:
            self._picture = draw(self._board)

    @hookimpl
    def on_evaluate(self, evaluation: Evaluation) -> None:
        self._board.evaluation = copy.copy(evaluation)

    @hookimpl
    def on_checkpoint(self, event: CheckpointEvent) -> None:
        if event.kind == "saved":
            self._board.saved = event.step

    @property
    def picture(self) -> str:
        """The SVG."""
        return self._picture


def draw(board: Board) -> str:
    """The console's view of a board, below the command that started the run."""
    terminal = Terminal(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, highlight=False)
    terminal.print(Text.assemble(("$ ", "dim"), ("forge train", "bold")))
    terminal.print(render(board, COLUMNS))
    return terminal.export_svg(title="forge train", unique_id="forge")


def main() -> int:
    """Run and draw."""
    sys.modules.setdefault("screen", sys.modules[__name__])  # the plugin below is looked up by its module's name
    request = Request(
        config="quickstart", plugins=("screen:Camera",), without=("console", "sample"), set=tuple(sys.argv[1:])
    )
    setup = resolve(request)
    with tempfile.TemporaryDirectory() as folder:
        finished = train(setup, run_dir=Path(folder), resume="never")
    camera = setup.hooks.plugins["camera"]
    if finished.outcome != "done" or not isinstance(camera, Camera):
        print(f"The run was {finished.outcome}: no picture.", file=sys.stderr)
        return 1
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(camera.picture, encoding="utf-8")
    print(TARGET)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
