"""A model family of somebody else's: published with fused queries, keys and values and one tensor for each expert; here
with separate projections and stacked experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from forge_train import Init, Plugin, hookimpl, section
from forge_train_kit.facts import ARCHITECTURES
from forge_train_kit.hf import HFModel
from forge_train_kit.model import Embedding, Linear, RMSNorm
from forge_train_kit.state_map import Rename, Split, Stack, StateMap, Transpose

VOCABULARY, DIM, HIDDEN, EXPERTS, KV_HEADS, HEAD_DIM = 23, 8, 12, 5, 2, 2


def state_map() -> StateMap:
    """From what is published to forge's parameters. The layers and experts are those that are there."""
    qkv = Split(
        "h.{i}.qkv.weight",
        ("layers.{i}.q.weight", "layers.{i}.k.weight", "layers.{i}.v.weight"),
        shares=(2, 1, 1),
        groups=KV_HEADS,
    )
    experts = Transpose(("h.{i}.mlp.{e}.up",)) >> Stack("h.{i}.mlp.{e}.up", "layers.{i}.experts.up")
    others = Rename(
        {"wte": "embedding.weight", "lm_head": "head.weight", "h.{i}.ln.weight": "layers.{i}.norm.weight"},
    )
    return qkv | experts | others


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(EXPERTS, HIDDEN, DIM))

    def initial(self, name: str) -> Init:
        return Init("normal", 0.3)


class Block(nn.Module):
    """Every expert for every token; no attention, but with the weights of one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(DIM)
        self.q = Linear(DIM, 2 * KV_HEADS * HEAD_DIM, std=0.3)
        self.k, self.v = (Linear(DIM, KV_HEADS * HEAD_DIM, std=0.3) for _ in range(2))
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        each = torch.tanh(torch.einsum("bsd,ehd->bsh", y, self.experts.up)).sum(-1, keepdim=True)
        return x + self.q(y) + torch.cat([self.k(y), self.v(y)], -1) * each


class Family(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = Embedding(VOCABULARY, DIM, std=0.3)
        self.layers = nn.ModuleDict({str(index): Block() for index in range(layers)})
        self.head = Linear(DIM, VOCABULARY, std=0.3)

    @property
    def units(self) -> tuple[str, ...]:
        return tuple(f"layers.{index}" for index in self.layers)

    @property
    def roles(self) -> dict[str, str]:
        return {"embedding.weight": "embedding", "head.weight": "head"}

    def forward(self, x: Tensor, **extras: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return x


class OutsideFamily(Plugin):
    """Builds, reads and writes it."""

    api = (1, 0)
    facts = {"hf.architectures": ("OutsideForCausalLM",)}

    @section
    class Config:
        layers: int = 2

    @hookimpl
    def build_model(self, job: Any) -> nn.Module:
        return Family(self.config.layers)

    @hookimpl
    def import_hf(self, config: Any) -> HFModel | None:
        if config["architectures"] != [*ARCHITECTURES.of(self)]:
            return None
        return HFModel(state_map(), sections={"outside_family": {"layers": config["n_layer"]}})

    @hookimpl
    def export_hf(self, job: Any) -> HFModel:
        layers = job.config.sections["outside_family"].layers
        return HFModel(state_map(), {"architectures": [*ARCHITECTURES.of(self)], "n_layer": layers})
