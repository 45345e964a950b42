"""Stand-ins for what core hands a plugin: a job with its hooks, a model, a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from forge_train import CurrentStep, HookSpec, Plugin
from forge_train_kit.capabilities import KernelCapabilities
from forge_train_kit.heads import Head, HeadSpec
from forge_train_kit.layers import Attention, AttentionKernel, FeedForward, Layer
from forge_train_kit.losses import LossFunction
from forge_train_plugins.attention.gqa import GQA
from forge_train_plugins.attention.sdpa import SDPA
from forge_train_plugins.feed_forward.swiglu import SwiGLU
from forge_train_plugins.models.decoder import Decoder
from forge_train_plugins.models.lm_head import LanguageModelHead
from forge_train_plugins.tasks.cross_entropy import CrossEntropy

TINY = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 48, "vocabulary": 61, "max_sequence": 64}


def make(plugin: type[Plugin], **values: Any) -> Any:
    """A plugin with these values in its section."""
    return plugin(plugin.Config(**values))


class Hooks:
    """The slots and chains that the built-in model plugins ask for, each filled by the default one."""

    def __init__(self, job: Any, activation: str = "swiglu", tokenizer: Any = None) -> None:
        self._job, self._tokenizer = job, tokenizer
        self.gqa, self.sdpa, self.swiglu = make(GQA), make(SDPA), make(SwiGLU, activation=activation)
        self.cross_entropy, self.lm_head = make(CrossEntropy), make(LanguageModelHead)
        self.enabled: dict[str, Any] = {}
        self.opened = False

    def provider(self, slot: str) -> str | None:
        return "text" if slot == "tokenizer" and self._tokenizer is not None else None

    def gives(self, slot: str) -> str:
        return {"head": "token_logits"}[slot]

    def call(self, spec: HookSpec[..., Any], arguments: Mapping[str, Any]) -> Any:
        return getattr(self, spec.name)(*(value for name, value in arguments.items() if name != "job"))

    def modalities(self) -> list[Any]:
        return []

    def expert_groups(self, experts: int) -> list[Any]:
        return []

    def head(self, spec: HeadSpec) -> Head:
        return self.lm_head.head(spec, self._job)  # type: ignore[no-any-return]

    def tokenizer(self) -> Any:
        return self._tokenizer

    def attention(self, layer: Layer) -> Attention:
        return self.gqa.attention(layer, self._job)  # type: ignore[no-any-return]

    def attention_kernel(self) -> AttentionKernel:
        return self.sdpa.attention_kernel(self._job)  # type: ignore[no-any-return]

    def kernel_needs(self, config: object) -> list[tuple[str, KernelCapabilities]]:
        return []

    def intervene(self, model: Any) -> list[tuple[str, Any]]:
        return []

    def feed_forward(self, layer: Layer) -> FeedForward:
        return self.swiglu.feed_forward(layer, self._job)  # type: ignore[no-any-return]

    def loss(self) -> LossFunction:
        return self.cross_entropy.loss(self._job)  # type: ignore[no-any-return]


def job(**hooks: Any) -> Any:
    """A job with the defaults behind its hooks."""
    dist = SimpleNamespace(rank=0, complete=True, gather_stages=lambda value: [value])
    made = SimpleNamespace(steps=10, seed=0, dist=dist, device=torch.device("cpu"), config=SimpleNamespace(sections={}))
    made.step = CurrentStep()
    made.hooks = Hooks(made, **hooks)
    return made


def decoder(seed: int = 0, activation: str = "swiglu", **values: Any) -> Any:
    """A tiny decoder on the CPU, its weights drawn large enough that every term shows in the output."""
    plugin = make(Decoder, **(TINY | values))
    return initialised(plugin.build_model(job(activation=activation)), seed)


def initialised(module: nn.Module, seed: int = 0) -> Any:
    """Every parameter drawn at random, norms and biases too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            mean = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.normal_(mean, 0.2, generator=generator)
    return module


def part_model(part: nn.Module, on_micro_batch: Callable[..., None] = lambda last, batch: None) -> Any:
    """What stands for `forge_train.Model` with one part."""
    return SimpleNamespace(
        parts=[part],
        roles=getattr(part, "roles", {}),
        named_parameters=part.named_parameters,
        named_modules=part.named_modules,
        on_micro_batch=on_micro_batch,
    )


def run_config(sequence: int = 16, steps: int = 10) -> Any:
    """What `check_config` looks at."""
    return SimpleNamespace(train=SimpleNamespace(sequence=sequence, steps=steps))
