"""An outside low-rank adapter, and what its tests have the ranks do. It works beside split weights and alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import cases
import toys
from forge_train import Applied, Init, Job, Phase, Plugin, Transform, hookimpl, section
from forge_train_tools.testing import TinyRun, run_forge

RANK = 2


class LowRank(nn.Module):
    """`W x + B A x` (LoRA, arXiv:2106.09685) as a class laid over a linear's own, so that names and hooks stay."""

    weight: Tensor
    lora_down: nn.Parameter
    lora_up: nn.Parameter

    def initial(self, name: str) -> Init:
        return Init("zeros") if name == "lora_up" else Init("normal", 0.3)

    def forward(self, x: Tensor) -> Tensor:
        down, up = (_local(one) for one in (self.lora_down, self.lora_up))
        rows, columns = (_own(self.weight, axis) for axis in (0, 1))
        down = down if down.shape[1] == x.shape[-1] else down[:, columns]
        out: Tensor = super().forward(x)
        up = up if up.shape[0] == out.shape[-1] else up[rows]
        return out + F.linear(F.linear(x, down), up)


class Gained(nn.Module):
    """A norm with a gain of its own on top (IA³, arXiv:2205.05638)."""

    lora_gain: nn.Parameter

    def initial(self, name: str) -> Init:
        return Init("ones")

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.lora_gain


class Declared(LowRank):
    """Says itself that its gradients are whole, which is wrong beside a split weight."""

    partial_gradients = False


class Adapters(Plugin):
    """Adds low-rank updates to linears and gains to norms, and freezes all else."""

    api = (1, 0)

    @section
    class Config:
        linears: str = r"(attention\.[qvo]|feed_forward\.(up|down)|mix\.(up|down)|layers\.\d\.(up|down)|head)"
        norms: str = r"norm"
        split: bool = True
        """Split the factor that has a split weight's axis; else both are whole, and a rank uses its rows."""
        declared: bool = False
        frozen: bool = True

    @hookimpl
    def parallelize(self, job: Job) -> Transform:
        return Transform(Phase.ADAPT, "adapters", self._apply)

    def _apply(self, part: nn.Module) -> Applied:
        if self.config.frozen:
            part.requires_grad_(False)
        added = []
        for name, module in list(part.named_modules()):
            if isinstance(module, nn.Linear) and re.search(self.config.linears + "$", name):
                self._adapt(module)
                added += [f"{name}.lora_down", f"{name}.lora_up"]
            elif name and re.search(self.config.norms + "$", name):
                _lay_over(module, Gained)
                module.lora_gain = nn.Parameter(torch.empty(_width(module), device="meta"))
                added.append(f"{name}.lora_gain")
        return Applied(part, tuple(name.rpartition(".")[0] for name in added), added=tuple(added))

    def _adapt(self, module: nn.Linear) -> None:
        weight = module.weight
        (rows, columns), split = weight.shape, _split_axis(weight) if self.config.split else None
        module.lora_down = nn.Parameter(_empty(RANK, columns, like=weight if split == 1 else None))
        module.lora_up = nn.Parameter(_empty(rows, RANK, like=weight if split == 0 else None))
        _lay_over(module, Declared if self.config.declared else LowRank)


_CLASSES: dict[tuple[type, type], type] = {}


def _lay_over(module: nn.Module, over: type) -> None:
    own = type(module)
    module.__class__ = _CLASSES.setdefault((over, own), type(own.__name__, (over, own), {}))


def _width(norm: Any) -> int:
    return int(norm.weight.shape[-1])


def _split_axis(weight: Tensor) -> int | None:
    if not isinstance(weight, DTensor):
        return None
    ((axis),) = [place.dim for place in weight.placements if isinstance(place, Shard)]
    return axis


def _empty(*shape: int, like: Any = None) -> Tensor:
    whole = torch.empty(shape, device="meta")
    return whole if like is None else distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _own(weight: Tensor, axis: int) -> slice:
    """What a rank holds of a weight that is split along an axis."""
    if not isinstance(weight, DTensor) or weight.placements != (Shard(axis),):
        return slice(None)
    each = -(-weight.shape[axis] // weight.device_mesh.size())
    start = each * weight.device_mesh.get_local_rank()
    return slice(start, start + each)


def adapted(
    folder: str,
    plugins: Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
    steps: int = 4,
    adapters: bool = True,
    **more: Any,
) -> dict[str, Any]:
    """Train a tower of toys with or without adapters, and say what a rank came to."""
    values = {**toys.SMALL, "train.micro_batch": 1, **(config or {})}
    own = ["adapter_cases:Adapters"] if adapters else []
    run: TinyRun = run_forge(
        [*toys.TOYS, "toys:Noise", *own, "cases:Probe", *plugins],
        values,
        steps=steps,
        preset="",
        folder=Path(folder),
        **more,
    )
    probe = run.plugin("probe")
    trained = {name: p for name, p in run.model.named_parameters() if p.requires_grad}
    return {
        "losses": run.losses,
        "norms": [line["grad_norm"] for line in run.metrics],
        "weights": {name: cases.digest(cases.whole(p)) for name, p in run.model.named_parameters()},
        "trained": sorted(trained),
        "trained_bytes": sum(cases.size(p) for p in trained.values()),
        "gradient_bytes": probe.gradient_bytes,
        "optimizer_bytes": sum(
            cases.size(value) for held in run.optimizer.state.values() for value in held.values() if value.dim()
        ),
        "events": run.events,
        "run": str(run.run),
    }
