"""What ranks do for test_matrix_optimizers.py: train with matrix optimizers, say where they ended and what was sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from forge_train import Plugin, hookimpl
from forge_train.checkpoint.state import optimizer_state
from forge_train_kit.optim.matrices import Matrix
from forge_train_plugins.optimizers.muon import Muon
from forge_train_tools.testing import run_forge


class Begun(Plugin):
    """Keeps the weights that a run begins with."""

    api = (1, 0)

    @hookimpl
    def on_start(self, model: Any) -> None:
        self.weights = {name: whole(parameter) for name, parameter in model.named_parameters()}


def whole(tensor: Any) -> torch.Tensor:
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()  # type: ignore[no-any-return]


def train(
    folder: str,
    plugins: Sequence[str],
    config: Mapping[str, Any],
    steps: int = 6,
    name: str = "run",
    stop_at: int | None = None,
) -> dict[str, Any]:
    """Train, save where it began and ended to `NAME.pt`, and count what is sent for full matrices."""
    sent: list[int] = []
    original = dist.all_to_all_single

    def counting(output: Any, given: Any, into: Any = None, out_of: Any = None, group: Any = None, **more: Any) -> Any:
        if given.dtype == torch.uint8:  # matrices travel as bytes
            place = dist.get_rank(group)
            sent.append(sum(out_of) - out_of[place])
        return original(output, given, into, out_of, group=group, **more)

    own = {} if "schedule_free" in plugins else {"cosine.warmup": 1}
    share = 12 // (dist.get_world_size() // config.get("parallel.tp", 1))
    settings = {"train.global_batch": 12, "train.micro_batch": share // 2, **own, **config}
    with patch("torch.distributed.all_to_all_single", counting):
        run = run_forge((*plugins, Begun), settings, steps=steps, folder=Path(folder), name=name, stop_at=stop_at)
    weights = {key: whole(parameter) for key, parameter in run.model.named_parameters()}
    state = {
        f"{key}/{what}": whole(value)
        for key, values in optimizer_state(run.optimizer, run.model)["state"].items()
        for what, value in values.items()
        if isinstance(value, torch.Tensor)
    }
    if run.job.dist.main:
        everything = {"begun": run.plugin("begun").weights, "ended": weights, "state": state}
        torch.save(everything, Path(folder) / f"{name}.pt")
    matrices = [p for group in run.optimizer.param_groups if "momentum" in group for p in group["params"]]
    return {
        "losses": run.losses,
        "norms": run.numbers,
        "calls": len(sent),
        "sent": sum(sent),
        "steps": len(run.losses),
        "matrices": len(matrices),
        "elements": sum(p.numel() for p in matrices),
        "types": sorted({type(value).__name__ for p in matrices for value in run.optimizer.state[p].values()}),
    }


class PerShard(Muon):
    """Orthogonalises what each rank holds of a matrix instead of the matrix."""

    @hookimpl
    def optimizer(self, model: Any, job: Any) -> torch.optim.Optimizer:
        made: Any = super().optimizer(model, job)
        if job.dist.world > 1:
            made._traffic = []
            made._batches = [[Matrix(index, held[job.dist.rank])] for index, held in made._regions.items()]
        return made  # type: ignore[no-any-return]
