"""`forge trace`: one step of every rank, on one time line."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

from forge_train.base.errors import ConfigError
from forge_train.config import LENGTHS
from forge_train.mesh.layout import Layout

from ..configuration.request import Request, lay
from ..configuration.setup import resolve
from ..launching.launch import WorkerCommand, check_alone, launch
from .record import Trace

WORKER = "forge_train_tools.tracing.steps:worker"
STEP = 3
"""Step that is traced by default: the first ones allocate, and compile."""


def trace(request: Request, nproc: int = 1, *, step: int | None = None) -> Trace:
    """Train up to a step on local processes, and record that step. No evaluation is made and nothing is saved.

    A configuration without a length ends with the step.

    Args:
        request: the configuration.
        nproc: number of processes.
        step: which step, from 1; the third by default, or the last of a shorter run.

    Raises:
        ConfigError: for a configuration that can't be, or that has fewer steps.
        ForgeError: with the message of the rank that failed first.
    """
    check_alone("forge trace")
    if not {("train", key) for key in LENGTHS} & lay(request).values.keys():
        request = dataclasses.replace(request, set=(*request.set, f"train.steps={step or STEP}"))
    setup = resolve(request, world=nproc)
    steps = setup.config.train.steps
    step = step or min(STEP, steps or STEP)
    if steps and step > steps:
        raise ConfigError(f"--step {step}: the run ends at step {steps} (train.steps).")
    layout = Layout.of(setup.config.parallel, nproc)
    with tempfile.TemporaryDirectory(prefix="forge-trace-") as name:
        folder = Path(name)
        arguments = {"request": dataclasses.asdict(request), "step": step, "folder": str(folder)}
        work = WorkerCommand(WORKER, arguments, folder / "launch", folder / "log", quiet=True, layout=layout)
        ended = launch(work, nproc)
        ended.check()
        return Trace.read(folder, step, nproc, ended.result["device"])


__all__ = ["Trace", "trace"]
