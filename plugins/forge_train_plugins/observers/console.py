"""Display of a run while it trains."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from forge_train import CheckpointEvent, Evaluation, Finished, Job, LogRecord, Model, Plugin, hookimpl, section

if TYPE_CHECKING:
    from ._console.board import Board
    from ._console.lines import Lines
    from ._console.live import LiveView


class Console(Plugin):
    """Shows the run: one live view on a terminal or in a notebook, plain lines elsewhere; `--quiet` leaves it out."""

    api = (1, 0)
    facts = {"bench.display": True}

    @section
    class Config:
        live: bool = True
        """A live view where stdout is a terminal or the cell of a notebook; otherwise plain lines there too."""

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._board: Board | None = None
        self._face: Lines | LiveView | None = None

    @hookimpl
    def on_start(self, job: Job, model: Model) -> None:
        if not job.dist.main:
            return
        from ._console.board import Board

        self._board = Board.of(job, model)
        if self.config.live and sys.stdout.isatty():
            from ._console.live import LiveView

            self._face = LiveView(self._board)
        elif self.config.live and type(sys.stdout).__module__ == "ipykernel.iostream":  # a notebook's cell
            from ._console.notebook import NotebookView

            self._face = NotebookView(self._board)
        else:
            from ._console.lines import Lines

            self._face = Lines(self._board)

    @hookimpl
    def on_log(self, record: LogRecord | Evaluation) -> None:
        if not (self._board and self._face):
            return
        if isinstance(record, Evaluation):
            self._board.evaluation = record
            self._face.evaluate()
        else:
            self._board.log(record)
            self._face.log()

    @hookimpl
    def on_checkpoint(self, event: CheckpointEvent) -> None:
        if not (self._board and self._face):
            return
        if event.kind == "loaded":
            self._board.resume(event.step)
            self._face.resume(event.path)
        elif event.kind == "saved":
            self._board.saved = event.step
            self._face.save(event.path)

    @hookimpl
    def on_end(self, finished: Finished) -> None:
        if not (self._board and self._face):
            return
        if finished.error:
            self._board.failed = True
        else:
            self._board.finished, self._board.step = finished, finished.step
        self._face.close()
