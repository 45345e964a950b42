"""Processes for one piece of work, of which only the result is kept."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from .launch import WorkerCommand, launch


def launch_once(function: str, arguments: dict[str, Any], nproc: int) -> dict[str, Any]:
    """Run a function on local processes; returns its result on rank 0.

    Args:
        function: `module:name` of what each process calls.
        arguments: its keywords, as JSON.
        nproc: how many processes.

    Raises:
        ForgeError: with the message of the rank that failed first.
    """
    with tempfile.TemporaryDirectory(prefix="forge-") as name:
        folder = Path(name)
        ended = launch(WorkerCommand(function, arguments, folder / "launch", folder / "log", quiet=True), nproc)
        ended.check()
        return ended.result
