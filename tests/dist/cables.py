"""Plugins that disturb the machine of their rank from within a run, at a step: see `nodes`."""

from __future__ import annotations

import os
import subprocess
from typing import Annotated, Any

from forge_train import Ge, Plugin, Volatile, hookimpl, section


class Cable(Plugin):
    """A rank does a line of shell before the optimizer's step of a given number, where there are so many ranks."""

    api = (1, 0)

    @section
    class Config:
        does: Annotated[str, Volatile()] = ""
        at: Annotated[int, Ge(0), Volatile()] = 0
        rank: Annotated[int, Ge(0), Volatile()] = 1
        world: Annotated[int, Ge(0), Volatile()] = 2

    @hookimpl
    def on_gradients(self, update: Any) -> None:
        place = tuple(int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE"))
        if update.step == self.config.at and place == (self.config.rank, self.config.world):
            more = {"LAUNCHER": str(os.getppid())}
            subprocess.run(["sh", "-ec", self.config.does], env={**os.environ, **more}, check=True)
