"""A plugin that sends signals while a checkpoint is being written."""

from __future__ import annotations

import os
import time
from typing import Annotated, Any

from forge_train import Plugin, Volatile, hookimpl, section
from forge_train.checkpoint import writing
from forge_train.mesh.world import FORGE_LAUNCHED


class Signalling(Plugin):
    """Rank 0 sends them once the tensors of a step's checkpoint are on disk, and before it is sealed: to the launcher,
    or to itself where there is none."""

    api = (1, 0)

    @section
    class Config:
        numbers: Annotated[tuple[int, ...], Volatile()] = ()
        at: Annotated[int, Volatile()] = 2

    @hookimpl
    def on_step(self, step: Any) -> None: ...

    @hookimpl
    def on_checkpoint(self, event: Any) -> None:
        real = writing.seal

        def seal(*arguments: Any, **more: Any) -> int:
            writing.seal = real
            for number in self.config.numbers:
                os.kill(int(os.environ.get(FORGE_LAUNCHED, os.getpid())), number)
                time.sleep(0.3)
            return real(*arguments, **more)

        first = os.environ.get("RANK", "0") == "0"
        if first and event.kind == "saving" and event.step == self.config.at:
            writing.seal = seal
