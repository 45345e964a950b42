"""A pack that `forge train` repeats, as the command line tells it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from forge_train_tools.launching.world import here
from forge_train_tools.messages import show_progress
from forge_train_tools.packing.archive import is_pack

from . import screen
from .failures import complain

if TYPE_CHECKING:
    from forge_train.registry.setup import Setup
    from forge_train_tools.configuration.request import Request
    from forge_train_tools.packing.compared import Compared
    from forge_train_tools.packing.repeat import Repeat, Row


class Again(ExitStack):
    """The pack of a run that is repeated; does nothing for any other run.

    Args:
        quiet: whether to say only what went wrong.
        as_json: whether all of it is told as JSON at the end.
    """

    def __init__(self, *, quiet: bool, as_json: bool) -> None:
        super().__init__()
        self._quiet = quiet or as_json
        self._repeat: Repeat | None = None
        self._rows: list[Row] = []
        self._found: Compared | None = None

    def opened(
        self, request: Request, nproc: int | Literal["auto"], resume: str
    ) -> tuple[Request, int | Literal["auto"], str]:
        """Request, number of processes and run to resume; those of the pack that the request names, if it does."""
        if not request.config or not is_pack(Path(request.config)):
            return request, nproc, resume
        from forge_train_tools.packing.repeat import repeating

        asked = nproc if isinstance(nproc, int) else None
        self._repeat = made = self.enter_context(repeating(request, asked, resume))
        return made.request, nproc if here().launcher != "none" else made.nproc, made.resume

    def begin(self, setup: Setup | None) -> None:
        """Say what differs here from the packed record, in one table; None for a configuration that was refused."""
        if self._repeat is None or here().rank != 0:
            return
        if not self._quiet:
            show_progress()  # hashing the data may take long
        self._rows = self._repeat.differences(setup)
        told = f"Repeats {self._repeat.pack.index['run']} of {self._repeat.pack.name}."
        if self._quiet or not (self._rows or setup):
            return
        if not self._rows:
            screen.line(f"{told} Nothing differs: plugins, packages, machine, data, settings.")
            return
        screen.line(f"{told} What differs:")
        screen.table(("", "packed", "here"), [tuple(map(screen.visible, row)) for row in self._rows])
        click.echo()

    def named(self, message: str) -> str:
        """A message about the configuration, which was unpacked, with the name of the pack."""
        return message.replace(self._repeat.request.config, self._repeat.pack.name) if self._repeat else message

    def end(self, run: Path) -> None:
        """Compare the run with the pack, and say how."""
        if self._repeat is None:
            return
        self._found = found = self._repeat.compare(run)
        if not found.equal:
            complain(f"{self._repeat.pack.name}: not repeated. {found.described()}")
        elif not self._quiet:
            screen.line(f"\n{self._repeat.pack.name}", "bold")
            screen.line(found.described())

    def code(self, code: int) -> int:
        """The exit code: 1 for a run that is done and does not repeat its pack."""
        return 1 if code == 0 and self._found is not None and not self._found.equal else code

    def as_json(self) -> dict[str, Any]:
        """Further keys of `forge train --json`."""
        if self._repeat is None:
            return {}
        rows = [dict(zip(("what", "packed", "here"), row, strict=True)) for row in self._rows]
        found = self._found.as_json() if self._found else {"equal": None}
        return {"repeat": {"pack": self._repeat.pack.name, "differences": rows, **found}}
