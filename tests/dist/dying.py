"""A plugin whose rank dies while it starts, then in the middle of a step, and hangs at last."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from forge_train import Plugin, hookimpl


class Dies(Plugin):
    """Rank 1 dies in `on_start` of the first attempt, and before the third optimizer step of the second; in the third
    attempt it hangs there."""

    api = (1, 0)

    @hookimpl
    def on_start(self, job: Any) -> None:
        self.here, self.attempt = job.dist.rank == 1, job.dist.place.attempt
        if self.here and self.attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    @hookimpl
    def on_gradients(self, update: Any) -> None:
        if self.here and update.step == 3:
            if self.attempt == 2:
                time.sleep(6000)
            os.kill(os.getpid(), signal.SIGKILL)
