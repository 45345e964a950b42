"""Ranks that stall somewhere at step 3, until the watchdog has spoken; time passes for it only when they have."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist

import toys
from forge_train import Ge, hookimpl, section
from forge_train_plugins.resilience._watchdog import heart
from forge_train_tools.stacks import place

AT, LATE = 3, 1000.0
GROUPS: list[Any] = []


class Flags:
    """Files by which ranks tell each other how far they are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def up(self, name: str, text: str = "") -> None:
        part = self.folder / f".{name}-{os.getpid()}"
        part.write_text(text, encoding="utf-8")
        part.replace(self.folder / name)

    def is_up(self, name: str) -> bool:
        return (self.folder / name).exists()

    def wait(self, name: str) -> None:
        deadline = time.monotonic() + 120
        while not self.is_up(name):
            assert time.monotonic() < deadline, name
            time.sleep(0.01)


class LateLoader(toys.ToyLoader):
    """Stalls on the last rank."""

    flags: Flags | None = None

    def __next__(self) -> Any:
        dist_, train = self.job.dist, self.job.config.train
        if self.flags and dist_.rank == dist_.world - 1 and self.position == (AT - 1) * train.global_batch:
            self.flags.up("stalled")
            self.flags.wait("released")
        return super().__next__()


class Stalls(toys.ToyData):
    """Stalls the last rank in its loader, in this plugin, in a collective that only it calls, or as a whole."""

    api = (1, 0)

    @section
    class Config:
        mask: bool = True
        where: str = "plugin"
        at: Annotated[int, Ge(0)] = AT
        folder: str = ""

    @hookimpl
    def build_data(self, job: Any, split: str) -> Any:
        loader = LateLoader(job, True, 0)
        if self.config.where == "loader" and split == "train":
            loader.flags = Flags(Path(self.config.folder))
        return loader

    @hookimpl
    def on_start(self, job: Any) -> None:
        self.job, self.flags = job, Flags(Path(self.config.folder))
        if self.config.where == "collective":
            GROUPS[:] = [dist.new_group()]

    @hookimpl
    def on_gradients(self, update: Any) -> None:
        if update.step != self.config.at or self.job.dist.rank != self.job.dist.world - 1:
            return
        where = self.config.where
        if where != "loader":
            self.flags.up("stalled", str(os.getpid()))
        if where == "plugin":
            self.flags.wait("released")
        elif where == "collective":
            dist.all_reduce(torch.ones(1), group=GROUPS[0])
        elif where == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)


def train(folder: str, where: str, patch: Any = setattr) -> dict[str, Any]:
    """What the watchdog says, and what the run came to once it was let go."""
    flags = Flags(Path(folder) / "flags")
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    said: list[tuple[int, str]] = []
    waiting: list[float] = []

    def stalled() -> bool:
        """Between its flag and its stop, a process may still give a heartbeat."""
        if not flags.is_up("stalled") or where != "stopped":
            return flags.is_up("stalled")
        stat = Path("/proc", (flags.folder / "stalled").read_text(), "stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"

    def waits() -> bool:
        """For a while: the first collective that is seen may have been called by the others before they stalled."""
        waiting[:] = [*waiting, time.monotonic()] if place().awaits else []
        return bool(waiting) and waiting[-1] - waiting[0] > 1

    def clock() -> float:
        """Rank 0 is late once it waits for the one that has stalled, and the others are then."""
        if rank == 0 and stalled() and (world == 1 or waits()):
            flags.up("late")
        return LATE if flags.is_up("late") else 0.0

    def end(error: Exception, blamed: int) -> None:
        said.append((blamed, str(error)))
        if where == "stopped":
            os.kill(int((flags.folder / "stalled").read_text()), signal.SIGCONT)
        elif where == "collective":
            dist.all_reduce(torch.ones(1), group=GROUPS[0])
        flags.up("released")

    patch(heart, "clock", clock)
    patch(heart, "end", end)
    config = {"watchdog.seconds": 1.0, "stalls.where": where, "stalls.folder": str(flags.folder)}
    plugins, without = ["watchdog"], ["toy_data"]
    if world > 1:
        plugins, without = [*plugins, "layouts:Replicas"], [*without, "fsdp2"]
    run = toys.run(Path(folder), Stalls, *plugins, steps=5, config=config, name="run", without=without)
    dumps = run.run / "log" / "stalled"
    return {
        "said": said,
        "steps": run.finished.step,
        "stacks": sorted(file.name for file in dumps.iterdir()) if rank == 0 else [],
        "mine": (dumps / f"rank-{rank}.txt").read_text() if (dumps / f"rank-{rank}.txt").exists() else "",
        "folder": str(dumps),
        "losses": run.losses if rank == 0 else [],
    }


class Around(toys.Plugin):
    """Takes its time before a span of step 3 begins; its name sorts before the watchdog's."""

    api = (1, 0)
    alive = Path()
    late = False
    step = 0
    said: list[str]

    @section
    class Config:
        span: str = "step"

    @hookimpl
    def on_start(self, job: Any) -> None:
        type(self).alive = job.run.dir / "log" / "alive.json"
        type(self).late, type(self).said = False, []

    @hookimpl
    def on_step(self, step: Any) -> None:
        self.step = step.step

    @hookimpl
    def around(self, span: str) -> Any:
        return self._waits if span == self.config.span else None

    @contextmanager
    def _waits(self) -> Iterator[None]:
        if self.step == AT - 1:
            type(self).late = True
            deadline = time.monotonic() + 120
            while not self.said and not self._alive_in(self.config.span):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            time.sleep(0.3)  # some heartbeats
            type(self).late = False
        yield

    def _alive_in(self, span: str) -> bool:
        return self.alive.is_file() and json.loads(self.alive.read_text())["phase"] == span
