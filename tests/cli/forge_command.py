"""What running a command gives."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

import warm


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Forge = Callable[..., Ended]


def on_terminal(*arguments: str, columns: int) -> str:
    """What a command writes to a terminal that wants no colours. Help is as wide as the terminal was at the import."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "NO_COLOR": "1", "TERM": "dumb"}
    command = [sys.executable, "-m", "forge_train_cli", *arguments]
    begun = subprocess.Popen if "--help" in arguments else warm.Popen
    with begun(command, stdout=theirs, stderr=theirs, env=environment):
        os.close(theirs)
        shown = b""
        while True:
            try:
                shown += os.read(ours, 65536)
            except OSError:  # the end, on Linux
                break
    os.close(ours)
    return shown.decode()


def typed(*arguments: str, columns: int) -> list[str]:
    """The lines that a command shows in a terminal."""
    return click.unstyle(on_terminal(*arguments, columns=columns)).replace("\r\n", "\n").splitlines()
