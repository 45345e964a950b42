"""The first steps of a run, with everything written down that two layouts must have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch

from forge_train.base.files import write_json
from forge_train.mesh.world import World
from forge_train.registry.setup import Setup
from forge_train.run.run import Run

from ..configuration.request import Request
from ..configuration.setup import resolve
from ..facts import ROUNDS
from ..process import prepared
from .recording import Recording
from .routing import tie_of
from .watched import Watched

W = TypeVar("W", bound=Watched)


def worker(request: dict[str, Any], steps: int, folder: str) -> dict[str, Any]:
    """Run one process of a layout."""
    setup = resolve(Request.loaded(request), world=World.here().size)
    leave(setup, steps, Path(folder))
    return {"code": 0}


@contextmanager
def watching(kind: type[W], setup: Setup, folder: Path, *, rounding: bool = True) -> Iterator[W]:
    """A composed run, looked at from inside; every rank of a layout calls this.

    Args:
        kind: how it is looked at.
        setup: the configuration.
        folder: where it leaves things.
        rounding: whether plugins that round below the run's precision do so.
    """
    for enabled in setup.hooks.enabled.values():
        if ROUNDS.of(enabled.cls) and not rounding:
            setup.hooks.mute(enabled.name, acting=True)
    with prepared(setup, Run(folder / "run")) as job:
        yield kind(job)


def record(setup: Setup, steps: int, folder: Path, *, rounding: bool = True) -> Recording:
    """Take some steps on this process."""
    with watching(Watched, setup, folder, rounding=rounding) as watched:
        watched.take(min(steps, watched.job.steps))
        parameters, buffers = _held(watched)
        layout, tie = watched.job.dist.layout, tie_of(setup.config.train.precision)
        return Recording(
            [watched.seen], watched.first_gradients, parameters, layout, tie, buffers, watched.stepper.micro_batches(0)
        )


def leave(setup: Setup, steps: int, folder: Path) -> None:
    """Take some steps on a rank of a layout, and leave what `Recording.read` reads, and a checkpoint."""
    with watching(Watched, setup, folder) as watched:
        dist, watched.folder = watched.job.dist, folder
        watched.take(min(steps, watched.job.steps))
        parameters, buffers = _held(watched)
        watched.save(folder / "checkpoint")
        watched.seen.saved = watched.hashes()
        watched.seen.resumed = watched.taken_again()
        write_json(folder / f"rank-{dist.rank}.json", asdict(watched.seen))
        if watched.keeps:
            torch.save({"parameters": parameters, "buffers": buffers}, folder / f"stage-{dist.rank}.pt")
        dist.barrier()


def _held(watched: Watched) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Parameters with their roles, and persistent buffers."""
    parameters = {name: watched.model.roles.get(name, "") for name, _ in watched.model.named_parameters()}
    state = watched.model.state_dict().items()
    return parameters, {name: tensor.cpu().clone() for name, tensor in state if name not in parameters}
