"""Trains the quickstart and draws its screen into docs/assets/screen.svg, as rich exports it.

    python docs/screen.py

The view is that of the `console` plugin at the end of a real run. `tests/docs/test_written.py` compares everything but
its numbers with what a short run of the same preset shows.
"""

from __future__ import annotations

import copy
import html
import io
import re
import sys
import tempfile
from pathlib import Path

from rich.console import Console as Terminal
from rich.text import Text

from forge_train import CheckpointEvent, Evaluation, Finished, Job, LogRecord, Model, Plugin, hookimpl
from forge_train.engine import train
from forge_train_plugins.observers._console.board import Board
from forge_train_plugins.observers._console.live import render
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve

TARGET = Path(__file__).parent / "assets" / "screen.svg"
COLUMNS = 92
PRESET = "quickstart"


class Camera(Plugin):
    """Keeps what the console shows when a run is done."""

    api = (1, 0)
    _picture: str = ""

    @hookimpl
    def on_start(self, job: Job, model: Model) -> None:
        self._board = Board.of(job, model)
        self._board.name = PRESET
        self._board.plugins = [re.sub(r" path=\S+", "", line) for line in self._board.plugins]  # a check sets it

    @hookimpl
    def on_log(self, record: LogRecord | Evaluation) -> None:
        if isinstance(record, Evaluation):
            self._board.evaluation = copy.copy(record)
        else:
            self._board.log(record)

    @hookimpl
    def on_checkpoint(self, event: CheckpointEvent) -> None:
        if event.kind == "saved":
            self._board.saved = event.step

    @hookimpl
    def on_end(self, finished: Finished) -> None:
        self._board.finished, self._board.step = finished, finished.step
        self._picture = draw(self._board)

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


def picture(*settings: str) -> str:
    """Train, and draw how it ended.

    Args:
        settings: assignments on top of the preset.

    Raises:
        RuntimeError: the run did not end as it should.
    """
    sys.modules.setdefault("screen", sys.modules[__name__])  # the plugin above is looked up by its module's name
    request = Request(config=PRESET, plugins=("screen:Camera",), without=("console", "sample"), set=settings)
    setup = resolve(request)
    with tempfile.TemporaryDirectory() as folder:
        finished = train(setup, run_dir=Path(folder), resume="never")
    camera = setup.hooks.plugins["camera"]
    if finished.outcome != "done" or not isinstance(camera, Camera):
        raise RuntimeError(f"The run was {finished.outcome}: no picture.")
    return camera.picture


def words(svg: str) -> str:
    """What can be read in a picture."""
    return " ".join(html.unescape(re.sub(r"<style.*?</style>|<[^>]+>", " ", svg, flags=re.DOTALL)).split())


def main() -> int:
    """Run and draw."""
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(picture(*sys.argv[1:]), encoding="utf-8")
    print(TARGET)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
