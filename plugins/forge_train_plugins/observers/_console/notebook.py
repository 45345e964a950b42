"""The live view in a cell of a notebook: the same panel, drawn again in its place."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from rich.console import Console

from .live import ECHO, WIDEST, LiveView, render

if TYPE_CHECKING:
    from .board import Board

PAGE = '<pre style="white-space:pre;overflow-x:auto;line-height:normal">{code}</pre>'


class NotebookView(LiveView):
    """A board in a cell."""

    def __init__(self, board: Board) -> None:
        super().__init__(board, Console(record=True, file=io.StringIO(), width=WIDEST + ECHO, force_jupyter=False))

    def _start(self) -> None:
        from IPython import display

        untyped: Any = display
        self._cell = untyped.DisplayHandle()
        self._shown = False

    def _show(self) -> None:
        self.console.print(render(self.board, self.console.width))
        html = self.console.export_html(inline_styles=True, code_format=PAGE, clear=False)
        shown = {"text/html": html, "text/plain": self.console.export_text()}
        (self._cell.update if self._shown else self._cell.display)(shown, raw=True)
        self._shown = True

    def _stop(self) -> None:
        """The last view stays."""
