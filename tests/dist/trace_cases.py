"""Traced runs on ranks: what they leave, and that a traced step is the same step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from forge_train import Job, Model, Plugin, hookimpl
from forge_train.base.files import write_json
from forge_train.mesh.tensors import local
from forge_train.run.run import Run
from forge_train_tools.process import prepared as on_processes
from forge_train_tools.testing.runs import prepared, run_forge
from forge_train_tools.tracing.steps import Steps
from forge_train_tools.verification.fingerprints import hash_of

SLOW = "layers.1.feed_forward"
STEPS, TRACED = 4, 3


class Sleepy(Plugin):
    """Has rank 0 sleep in one module."""

    api = (1, 0)

    @hookimpl
    def on_start(self, job: Job, model: Model) -> None:
        def nap(module: nn.Module, args: Any) -> None:
            time.sleep(1.0)

        if job.dist.rank == 0:
            model.parts[0].get_submodule(SLOW).register_forward_pre_hook(nap)


def take(folder: str, plugins: Sequence[str], config: Mapping[str, Any], *, sleeps: bool = False) -> dict[str, Any]:
    """Trace a step and leave it in the folder; without sleep, also what plain steps and `forge train` give."""
    enabled = (*plugins, *([Sleepy] if sleeps else []))
    found = _steps(folder, enabled, config, traced=True)
    if sleeps:
        return {"traced": found}
    plain = _steps(folder, enabled, config, traced=False)
    trained = run_forge(enabled, config, steps=STEPS, folder=Path(folder) / "trained").losses
    return {"traced": found, "plain": plain, "trained": trained, "shapes": found.pop("shapes")}


def traced(folder: str, plugins: Sequence[str], config: Mapping[str, Any]) -> None:
    """Trace a step, and leave it in the folder."""
    _steps(folder, plugins, config, traced=True)


def _steps(folder: str, plugins: Sequence[Any], config: Mapping[str, Any], *, traced: bool) -> dict[str, Any]:
    losses = []
    with (
        prepared(plugins, config, steps=STEPS, folder=Path(folder)) as setup,
        on_processes(setup, Run(Path(folder) / "run")) as job,
    ):
        steps = Steps(job)
        for step in range(1, STEPS + 1):
            if traced and step == TRACED:
                found = steps.traced()
                write_json(Path(folder) / f"rank-{job.dist.rank}.json", found.plain())
                losses.append(found.loss)
            else:
                losses.append(float(steps.take().loss))
        weights = {name: hash_of(local(tensor)) for name, tensor in steps.model.state_dict().items()}
        shapes = {name: list(parameter.shape) for name, parameter in steps.model.named_parameters()}
    return {"losses": losses, "weights": weights, **({"shapes": shapes} if traced else {})}
