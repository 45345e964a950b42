"""Models for the tests of tensor parallelism, and what these have the ranks do."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from forge_train import Init, Plugin, hookimpl
from forge_train_kit import hookspecs
from forge_train_kit.model import Embedding, Linear, RMSNorm, TensorStyle
from forge_train_plugins.parallel._tp.replicas import Replicas, Whole

WIDTH = 16


class Mixer(nn.Module):
    """Mixes each token with the one before; `gain`, in a block, and `scale`, outside, stand in no plan."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(WIDTH)
        self.mix = Mix()
        self.scale = nn.Parameter(torch.empty(WIDTH))

    def initial(self, name: str) -> Init:
        return Init("normal", 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.norm(x)) * self.scale


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.empty(1))

    def initial(self, name: str) -> Init:
        return Init("normal", 0.3)

    def forward(self, x: Tensor) -> Tensor:
        shifted = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)
        return self.down(torch.tanh(self.up(x + shifted)) * self.gain)


class Model(nn.Module):
    """What a third party might write: torch's own linears, a learned position, no attention."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = Embedding(vocabulary, WIDTH, std=0.3)
        self.place = Embedding(64, WIDTH, std=0.3)
        self.layers = nn.ModuleDict({str(index): Mixer() for index in range(2)})
        self.head = Linear(WIDTH, vocabulary, std=0.3)

    @property
    def units(self) -> tuple[str, ...]:
        return tuple(f"layers.{index}" for index in self.layers)

    @property
    def roles(self) -> dict[str, str]:
        return {"embedding.weight": "embedding", "head.weight": "head"}

    def tensor_plan(self) -> dict[str, TensorStyle]:
        plan: dict[str, TensorStyle] = {"embedding": "vocabulary", "place": "vocabulary", "head": "logits"}
        for unit in self.units:
            plan |= {f"{unit}.norm": "sequence", f"{unit}.mix": "gather"}
            plan |= {f"{unit}.mix.up": "colwise", f"{unit}.mix.down": "rowwise"}
        return plan

    def forward(self, x: Tensor, **extras: Tensor) -> Tensor:
        x = self.embedding(x) + self.place(torch.arange(x.shape[1]).expand_as(x))
        for layer in self.layers.values():
            x = layer(x)
        return x


class Third(Plugin):
    """A third party's model."""

    api = (1, 0)

    @hookimpl
    def build_model(self, job: Any) -> nn.Module:
        return Model(hookspecs.tokenizer(job).vocabulary)


class Unplanned(Plugin):
    """A model that says nothing of how to split it."""

    api = (1, 0)

    @hookimpl
    def build_model(self, job: Any) -> nn.Module:
        model = Model(hookspecs.tokenizer(job).vocabulary)
        model.tensor_plan = None  # type: ignore[method-assign,assignment]
        return model


def judge(partial: bool, same: bool, added: bool = False) -> str:
    """What is said of a parameter that no plan names, and whose gradient is (or is not) the same on all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    part = nn.Linear(2, 2, bias=False)
    part.weight.grad = torch.ones(2, 2) * (1 if same else 1 + dist.get_rank())
    replicas = Replicas(part, [Whole("weight", partial, planned=False, added=added)], mesh)
    try:
        replicas.reduce()
    except Exception as error:
        return str(error)
    return str(part.weight.grad.tolist())
