"""Plugins whose rank dies: while it starts, in the middle of a step, or while a checkpoint is written; or hangs."""

from __future__ import annotations

import atexit
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forge_train import Plugin, hookimpl
from forge_train.checkpoint import writing


class Dies(Plugin):
    """Rank 1 dies in `on_start` of the first attempt, and before the third optimizer step of the second; in the third
    attempt it hangs before the third forward pass."""

    api = (1, 0)

    @hookimpl
    def on_start(self, job: Any) -> None:
        self.here, self.attempt, self.steps = job.dist.rank == 1, job.dist.place.attempt, 0
        if self.here and self.attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    @hookimpl
    def around(self, span: str, job: Any) -> Any:
        return self.hang if span == "forward_backward" else None

    @contextmanager
    def hang(self) -> Iterator[None]:
        self.steps += 1
        if self.here and self.attempt == 2 and self.steps == 3:
            time.sleep(6000)
        yield

    @hookimpl
    def on_gradients(self, update: Any) -> None:
        if self.here and self.attempt == 1 and update.step == 3:
            os.kill(os.getpid(), signal.SIGKILL)


class DiesWriting(Plugin):
    """Rank 1 dies in the first attempt while step 4's checkpoint is written behind its back."""

    api = (1, 0)

    @hookimpl
    def on_start(self, job: Any) -> None:
        self.dies = job.dist.rank == 1 and job.dist.place.attempt == 0

    @hookimpl
    def on_step(self, step: Any) -> None: ...

    @hookimpl
    def on_checkpoint(self, event: Any) -> None:
        def seal(*arguments: Any, **more: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        if self.dies and (event.kind, event.step) == ("saving", 4):
            writing.seal = seal


class Dwindles(Plugin):
    """The last of four ranks dies in the first attempt after step 5, and in the second before its first step; the last
    of two after step 7 in the third."""

    api = (1, 0)

    @hookimpl
    def on_start(self, job: Any) -> None:
        self.attempt, self.last = job.dist.place.attempt, job.dist.rank == job.dist.world - 1
        if self.last and self.attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    @hookimpl
    def on_gradients(self, update: Any) -> None:
        if self.last and (self.attempt, update.step) in ((0, 5), (2, 7)):
            os.kill(os.getpid(), signal.SIGKILL)


def dies_closing(attempts: str, code: int) -> dict[str, Any]:
    """What a rank does that ends with an exit code, noting its attempt, and is killed on its way out; another file
    that it was writing is not whole."""
    with Path(attempts).open("a", encoding="utf-8") as out:
        out.write("again\n")
    Path(attempts).with_name("launch").joinpath(".outcome.json.partial").touch()
    atexit.register(os.kill, os.getpid(), signal.SIGKILL)
    return {"code": code}


class DiesAsked(Plugin):
    """The last rank dies in the gradients of the step that the environment names (`DIES_AT`), if it names one."""

    api = (1, 0)

    @hookimpl
    def on_start(self, job: Any) -> None:
        self.last, self.step = job.dist.rank == job.dist.world - 1, int(os.environ.get("DIES_AT", "0"))

    @hookimpl
    def on_gradients(self, update: Any) -> None:
        if self.last and update.step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)
