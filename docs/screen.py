"""Draws what commands show on a terminal into docs/assets, as rich exports it.

    python docs/screen.py

`screen.svg` is the view of the `console` plugin at the end of a real run of the quickstart; the others are what the
commands of `SCREENS` print. `tests/docs/test_written.py` compares everything but numbers with what is shown now.
"""

from __future__ import annotations

import contextlib
import copy
import html
import io
import os
import re
import sys
import tempfile
from pathlib import Path

from rich.console import Console as Terminal
from rich.text import Text

from forge_train import CheckpointEvent, Evaluation, Finished, Job, LogRecord, Model, Plugin, hookimpl
from forge_train.engine import train
from forge_train_cli.app import run
from forge_train_plugins.observers._console.board import Board
from forge_train_plugins.observers._console.live import render
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve

TARGET = Path(__file__).parent / "assets" / "screen.svg"
COLUMNS = 92
PRESET = "quickstart"
SMALL = "-s decoder.dim=64 -s decoder.layers=2"
SCREENS = {
    "mistake": "forge train -s train.stepz=3 -s adamw.lr=fast",
    "plan": "forge plan --world 4 -p tp -s parallel.tp=2",
    "verify": f"forge verify --nproc 2 --steps 2 {SMALL}",
    "check": "forge plugins check lion",
}
"""Other pictures: name → command."""


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


class _Terminal(io.StringIO):
    """A stream that calls itself a terminal."""

    def isatty(self) -> bool:
        return True


def shot(name: str) -> str:
    """The picture of a command of `SCREENS`."""
    return drawn(name, SCREENS[name], COLUMNS)


def drawn(name: str, command: str, columns: int) -> str:
    """The picture of a command, on a terminal of so many columns."""
    shown = _Terminal()
    look = {"COLUMNS": str(columns), "TERM": "xterm-256color", "COLORTERM": "truecolor", "NO_COLOR": ""}
    before = dict(os.environ)
    os.environ |= look
    try:
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
            run(command.split()[1:])
    finally:
        os.environ.clear()
        os.environ |= before
    terminal = Terminal(record=True, width=columns, file=io.StringIO(), force_terminal=True, highlight=False)
    terminal.print(Text.assemble(("$ ", "dim"), (command, "bold")))
    terminal.print(Text.from_ansi(shown.getvalue().rstrip()))
    return terminal.export_svg(title=" ".join(command.split()[:2]), unique_id=f"forge-{name}")


def target(name: str) -> Path:
    """Where it is kept."""
    return TARGET.with_name(f"screen-{name}.svg")


def words(svg: str) -> str:
    """What can be read in a picture."""
    return " ".join(html.unescape(re.sub(r"<style.*?</style>|<[^>]+>", " ", svg, flags=re.DOTALL)).split())


def main() -> int:
    """Run and draw."""
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(picture(*sys.argv[1:]), encoding="utf-8")
    print(TARGET)
    shots()
    return 0


def shots() -> None:
    """Draw the commands of `SCREENS`."""
    for name in SCREENS:
        target(name).write_text(shot(name), encoding="utf-8")
        print(target(name))


if __name__ == "__main__":
    raise SystemExit(main())
