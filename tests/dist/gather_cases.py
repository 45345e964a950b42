"""What ranks gather in float8, told by bits and bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from cases import tiny, whole
from forge_train import Job, Model, Plugin, Update, hookimpl
from forge_train_plugins.precision._low_precision.gather import PackedGather, gather_packed, packed, unpack
from forge_train_tools.planning.communication import Collective, Collectives
from forge_train_tools.verification.record import worker

LOW = ("even", "uneven", "across", "experts", "shared")
"""Modules that multiply in float8; the weight of the last is another module's too."""


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.even, self.uneven, self.across = nn.Linear(33, 48), nn.Linear(17, 50), nn.Linear(48, 50, bias=False)
        self.experts = nn.Bilinear(16, 32, 5, bias=False)  # a weight of three axes: [5, 16, 32]
        self.plain, self.shared, self.other = nn.Linear(24, 21), nn.Linear(20, 48), nn.Linear(20, 48)
        self.other.weight = self.shared.weight


def gathered(precision: str, replicas: int = 1) -> dict[str, Any]:
    """The weights of `Mixed` that were gathered in float8, which parameters were not what they should be, and the
    bytes of each gather, all ranks together."""
    dtype, shards = getattr(torch, precision), dist.get_world_size() // replicas
    torch.manual_seed(0)
    model = Mixed()
    held = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicas", "shards"))
    fully_shard(
        model,
        mesh=mesh if replicas > 1 else mesh["shards"],
        shard_placement_fn=lambda parameter: Shard(1) if parameter is model.across.weight else None,
        mp_policy=MixedPrecisionPolicy(param_dtype=dtype),
    )
    found, _ = gather_packed(model, {(id(model.get_submodule(name)), "weight"): name for name in LOW})
    assert isinstance(model, FSDPModule)
    sent: list[Collective] = []
    wrong = []
    for _ in range(2):  # the second time into memory that was freed
        with Collectives(sent.append):
            model.unshard()
        for name, parameter in model.named_parameters():
            expected = held[name].to(dtype)
            if name.removesuffix(".weight") in found:
                parts = expected.chunk(shards, 1) if name == "across.weight" else [expected]
                expected = torch.cat([_there_and_back(part) for part in parts], 1)
            if parameter.dtype is not dtype or not torch.equal(parameter, expected):
                wrong.append(name)
        model.reshard()
    plain = all(isinstance(one, DTensor) and type(one.to_local()) is Tensor for one in model.parameters())
    return {"found": found, "wrong": wrong, "sent": [[one.kind, one.ranks, one.held] for one in sent], "plain": plain}


def _there_and_back(weight: Tensor) -> Tensor:
    out = torch.empty_like(weight)
    unpack(packed(weight), out)
    return out


class Gradients(Plugin):
    """Keeps those of the first step."""

    api = (1, 0)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.first: dict[str, Tensor] = {}

    @hookimpl
    def on_start(self, job: Job, model: Model, optimizer: torch.optim.Optimizer) -> None:
        self.model = model

    @hookimpl
    def on_gradients(self, update: Update) -> None:
        self.first = self.first or {
            name: whole(parameter.grad).clone()
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }


def apart(folder: str, plugins: Sequence[str], config: Mapping[str, Any]) -> dict[str, float]:
    """How far the first gradients with `fp8.all_gather` are from those without, as a part of how far float8 takes them
    from those of the run's precision, parameter by parameter."""

    def first(*more: str, **settings: Any) -> dict[str, Tensor]:
        used = {key: value for key, value in config.items() if "fp8" in more or not key.startswith("fp8.")}
        run = tiny(folder, (*plugins, *more, Gradients), {**used, **settings}, steps=1)
        found: dict[str, Tensor] = run.plugin("gradients").first
        return found

    on, off, plain = first("fp8", **{"fp8.all_gather": True}), first("fp8"), first()
    return {name: float((on[name] - off[name]).norm() / (off[name] - plain[name]).norm()) for name in plain}


def verified(request: dict[str, Any], folder: str) -> int:
    """How often a rank packs what it gathers in two steps of `forge verify`."""
    calls = 0
    real = PackedGather.__call__

    def counted(*args: Any, **more: Any) -> None:
        nonlocal calls
        calls += 1
        real(*args, **more)

    with patch.object(PackedGather, "__call__", counted):
        worker(request, 2, folder)
    return calls
