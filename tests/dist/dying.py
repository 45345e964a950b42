"""A plugin whose rank dies: while it starts, and when it was started again, in the middle of a step."""

from __future__ import annotations

import os
import signal
from typing import Any

from forge_train import Plugin, hookimpl


class Dies(Plugin):
    """Rank 1 dies in `on_start` of the first attempt, and before the third optimizer step of the second."""

    api = (1, 0)

    @hookimpl
    def on_start(self, job: Any) -> None:
        self.here = job.dist.rank == 1
        if self.here and job.dist.place.attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    @hookimpl
    def on_gradients(self, update: Any) -> None:
        if self.here and update.step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
