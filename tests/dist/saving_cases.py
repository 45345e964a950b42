"""What the tests of saving in the background have their ranks do."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from forge_train import Plugin, hookimpl
from forge_train.base.files import DiskError
from forge_train.store.save_plan import Shards
from forge_train_kit.background import Background
from forge_train_tools.saver import Saver
from forge_train_tools.testing import run_forge
from full_disk import full_for
from saving import ASYNC, contents, overwritten, slow_disk

SMALL = {"train.global_batch": 12, "train.micro_batch": 3, "checkpoint.every": 2, "checkpoint.keep": 9}


class Notes(Plugin):
    """Notes what is told of checkpoints, and at which step; and sets an event at the end of step 3."""

    written = threading.Event()

    @hookimpl
    def on_start(self, job: Any) -> None:
        self.told: list[tuple[str, int, int]] = []
        self.step = 0
        Notes.written.clear()

    @hookimpl
    def on_checkpoint(self, event: Any) -> None:
        self.told.append((event.kind, event.step, self.step))

    @hookimpl
    def on_step(self, step: Any) -> None:
        self.step = step.step
        if step.step == 3:
            Notes.written.set()
        if dist.get_rank() == 1:
            time.sleep(0.01)


def save(folder: str, plugins: Sequence[Any], config: Mapping[str, Any], *, name: str, behind: bool) -> dict[str, Any]:
    """Train; in the background, the first checkpoint is written only after the next step, everything it was made of
    is overwritten at once, and one rank's thread ends later than the other's."""
    run_background = Background._run

    def late(self: Background[Any]) -> None:
        run_background(self)
        if dist.get_rank() == 1:
            time.sleep(0.1)

    with ExitStack() as stack:
        if behind:
            stack.enter_context(slow_disk(Notes.written))
            stack.enter_context(patch.object(Background, "_run", late))
            names = stack.enter_context(overwritten(2))
        mine = stack.enter_context(shares())
        settings = {**SMALL, **config, **(ASYNC if behind else {})}
        run = run_forge([*plugins, Notes], settings, steps=6, folder=Path(folder), name=name)
    return {
        "contents": contents(run.run / "checkpoints" / "step-00000002"),
        "told": run.plugin("notes").told,
        "names": names if behind else [],
        "bytes": mine[0],
    }


@contextmanager
def shares() -> Iterator[list[int]]:
    """How many bytes this rank writes of each checkpoint."""
    found: list[int] = []
    real = Shards.write

    def write(self: Shards, *arguments: Any) -> Any:
        found.append(sum(shard.bytes for shard in self.plan.mine))
        return real(self, *arguments)

    with patch.object(Shards, "write", write):
        yield found


def refused(folder: str, ending: str, rank: int) -> dict[str, Any]:
    """Train until a rank's disk is full, behind its back."""
    steps: list[int] = []

    class Counts(Plugin):
        @hookimpl
        def on_step(self, step: Any) -> None:
            steps.append(step.step)

    with full_for(*((ending,) if dist.get_rank() == rank else ()), below=".partial"):
        try:
            run_forge([Counts], {**SMALL, **ASYNC}, steps=99, name="run", folder=Path(folder))
        except DiskError as error:
            return {"error": str(error), "steps": len(steps)}
    return {"error": "", "steps": len(steps)}


def plans(folder: str, plugins: Sequence[Any]) -> list[bool]:
    """Whether each checkpoint after the first takes the plan of the one before."""
    seen: list[Any] = []
    real = Saver.save

    def saved(self: Saver, *arguments: Any, **more: Any) -> None:
        real(self, *arguments, **more)
        seen.append(self._plan)

    with patch.object(Saver, "save", saved):
        run_forge(plugins, {**SMALL, "checkpoint.every": 1}, steps=3, folder=Path(folder), name="run")
    return [one is seen[0] for one in seen]
