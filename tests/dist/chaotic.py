"""A plugin that brings one misfortune over a run, as `CHAOS` in the environment says. Enable it as `chaotic:Chaos`.

It strikes in the first attempt of a command alone, and never in the process that starts the ranks.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from forge_train import Plugin, hookimpl

VARIABLE, STRUCK = "CHAOS", "CHAOS_STRUCK"
"""The misfortune, and a file that is made when it comes."""
PAUSE = 0.02
"""Seconds of a step, so that it can be met."""
BACK = 3600.0
"""Seconds that a clock jumps back."""

Deed = Literal["kill", "kill_all", "kill_launcher", "signals", "hang", "full", "clock"]
Moment = Literal["any", "import", "start", "step", "copy", "write", "seal", "rename", "renamed", "prune"]
MOMENTS: tuple[Moment, ...] = ("any", "import", "start", "step", "copy", "write", "seal", "rename", "renamed", "prune")
ON_MAIN = ("rename", "renamed")
"""What only rank 0 does."""


@dataclass(frozen=True)
class Misfortune:
    """What happens, and when."""

    deed: Deed
    moment: Moment = "step"
    at: int = 1
    """The how manieth time that a rank comes there."""
    rank: int = 0
    delay: float = 0.0
    """Seconds from there on: it then strikes wherever the process is by that time."""
    signals: Sequence[int] = ()
    """Sent to the launcher, one after the other."""
    gap: float = 0.0
    """Seconds between them."""
    slow: float = 0.0
    """Seconds that the disk takes for each file and each flush, from the start."""

    def as_json(self) -> str:
        return json.dumps(asdict(self))


class _Fate:
    """Counts how often this rank came to the moment."""

    def __init__(self, misfortune: Misfortune) -> None:
        self.plan, self._seen = misfortune, 0

    def reached(self, moment: str) -> None:
        if moment != self.plan.moment:
            return
        self._seen += 1
        if self._seen != self.plan.at:
            return
        if self.plan.delay and self.plan.deed != "hang":
            timer = threading.Timer(self.plan.delay, self.strike)
            timer.daemon = True
            timer.start()
        else:
            self.strike()

    def strike(self) -> None:
        Path(os.environ[STRUCK]).touch()
        deed, parent = self.plan.deed, os.getppid()
        if deed == "hang":
            time.sleep(6000)
        elif deed == "kill_launcher":
            os.kill(parent, signal.SIGKILL)
        elif deed == "signals":
            for number in self.plan.signals:
                os.kill(parent, number)
                time.sleep(self.plan.gap)
        elif deed == "full":
            from full_disk import full_for

            full_for(".safetensors", below=".partial").__enter__()
        elif deed == "clock":
            real = time.time
            time.time = lambda: real() - BACK
        else:
            others = Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="ascii").split()
            for pid in others if deed == "kill_all" else ():
                if int(pid) != os.getpid():
                    os.kill(int(pid), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def _mine() -> _Fate | None:
    """What is to happen in this process."""
    if VARIABLE not in os.environ or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        return None
    misfortune = Misfortune(**json.loads(os.environ[VARIABLE]))
    return _Fate(misfortune) if os.environ.get("RANK") == str(misfortune.rank) else None


def _watch(owner: Any, name: str, moment: str, fate: _Fate) -> None:
    real = getattr(owner, name)

    def call(*arguments: Any, **more: Any) -> Any:
        fate.reached(moment)
        return real(*arguments, **more)

    setattr(owner, name, call)


def _slow_down(seconds: float) -> None:
    """A disk that takes its time."""
    from forge_train.store import save_plan

    flush, write = os.fsync, save_plan.write_shards

    def fsync(handle: int) -> None:
        time.sleep(seconds)
        flush(handle)

    def write_shards(*arguments: Any) -> Any:
        time.sleep(seconds)
        return write(*arguments)

    os.fsync, save_plan.write_shards = fsync, write_shards


FATE = _mine()
if FATE is not None:
    FATE.reached("import")
    FATE.reached("any")


class Chaos(Plugin):
    """Strikes."""

    api = (1, 0)

    @hookimpl
    def on_start(self, job: Any) -> None:
        if FATE is None:
            return
        from forge_train.checkpoint import writing
        from forge_train.loop import saver
        from forge_train.store.save_plan import Shards

        FATE.reached("start")
        for owner, name, moment in (
            (Shards, "copy", "copy"),
            (Shards, "write", "write"),
            (writing, "seal", "seal"),
            (writing, "_publish", "rename"),
            (writing, "sync", "renamed"),  # the checkpoint has its name, and `latest` names the one before
            (saver, "prune", "prune"),
        ):
            _watch(owner, name, moment, FATE)
        if FATE.plan.slow:
            _slow_down(FATE.plan.slow)

    @hookimpl
    def on_step(self, step: Any) -> None:
        step.add("draw", torch.rand(()))  # which shows whether each rank's random numbers are restored
        time.sleep(PAUSE)
        if FATE is not None:
            FATE.reached("step")
