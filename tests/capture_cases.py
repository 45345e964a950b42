"""Runs with `capture`, and what plain forward hooks see of the same run on one process."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from forge_train import Job, Model, Plugin, hookimpl
from forge_train_tools.testing import run_forge
from hf_models import MODELS

BASE: Mapping[str, Any] = {
    "train.global_batch": 8,
    "train.micro_batch": 2,
    "train.sequence": 16,
    "capture.modules": ["*"],
    "capture.steps": [2],
}
MICRO_BATCHES = 4


def hf(kind: str) -> dict[str, Any]:
    """A tiny class of transformers, on the same text."""
    values = {key: one for key, one in MODELS[kind].items() if key != "vocab_size"}
    return {"hf.type": kind, **{f"hf.set.{key}": one for key, one in values.items()}}


HEADS: Mapping[str, Any] = {"decoder.heads": 4, "decoder.kv_heads": 2}
SHAPES: Mapping[str, tuple[tuple[str, ...], Mapping[str, Any]]] = {
    "decoder": ((), HEADS),
    "moe": (("moe",), {**HEADS, "moe.experts": 4, "moe.top_k": 2, "moe.shared": 1}),
    "mla": (("mla",), {"decoder.heads": 4, "decoder.kv_heads": 4, "mla.kv_rank": 16, "mla.rope_dim": 8}),
    "delta_net": (("delta_net",), {**HEADS, "delta_net.heads": 4, "delta_net.k_heads": 4}),
    "arcee": (("hf",), hf("arcee")),
    "olmoe": (("hf",), hf("olmoe")),
    "gpt_neox": (("hf",), hf("gpt_neox")),
}
"""Model → plugins and settings."""


class Hooks(Plugin):
    """Plain forward hooks on every module, in the second step and in evaluations."""

    api = (1, 0)
    seen: dict[str, list[Any]] = {}

    @hookimpl
    def on_start(self, job: Job, model: Model) -> None:
        self._on = False
        Hooks.seen = {}
        for name, module in model.named_modules():
            if name:
                module.register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Any:
        def keep(module: Any, inputs: Any, output: Any) -> None:
            if self._on and torch._C._current_graph_task_id() == -1:
                Hooks.seen.setdefault(name, []).append(output)

        return keep

    @hookimpl
    def around(self, span: str) -> Any:
        return self._spans if span == "forward_backward" else None

    @contextmanager
    def _spans(self) -> Iterator[None]:
        Hooks.seen, self._on = {}, True
        yield
        self._on = False


def train(folder: str, model: str, plugins: list[str], config: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A run of a model; gives its folder and its numbers."""
    own, settings = SHAPES[model]
    run = run_forge(
        [*own, "capture", *plugins, *more.pop("classes", ())],
        {**BASE, **settings, **config},
        folder=Path(folder),
        steps=2,
        **more,
    )
    return {"run": str(run.run), "numbers": run.numbers}


def captured(run: str | Path, name: str = "step-00000002") -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a file."""
    with safe_open(Path(run) / "artifacts" / "capture" / f"{name}.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118


def place(value: Any, path: str) -> Tensor:
    """The tensor at a place in what a module gave."""
    for word in re.findall(r"\[(\w+)\]", path):
        if isinstance(value, (tuple, list)):
            value = value[int(word)]
        else:
            value = value[word] if isinstance(value, dict) else getattr(value, word)
    return value if isinstance(value, Tensor) else value[0]


def by_hooks(key: str, like: Tensor) -> Tensor:
    """The same by plain hooks, which know a shared module by its first name."""
    name, path, call = re.fullmatch(r"(.*?)((?:\[\w+\])*)(?:#(\d+))?", key).groups()  # type: ignore[union-attr]
    first = re.sub(r"layers\.\d+\.attention\.rope", "layers.0.attention.rope", name)
    outputs = Hooks.seen[first]
    calls = len(outputs) // MICRO_BATCHES
    at = int(call or 1) - 1 + (2 * int(name.split(".")[1]) if name.endswith(".rope") else 0)
    found = [place(one, path) for one in outputs[at::calls]]
    if like.shape[0] == 8 and found[0].shape[0] == 1:
        found = [one.expand(2, *one.shape[1:]) for one in found]
    return torch.cat(found).detach().reshape(like.shape)


def differences(found: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> dict[str, float]:
    """The largest difference of each activation, by its largest value; infinite for another name, shape or integer."""
    apart: dict[str, float] = {}
    for name in found.keys() | right.keys():
        ours, theirs = found.get(name), right.get(name)
        apart[name] = torch.inf
        if ours is None or theirs is None or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            continue
        if ours.is_floating_point():
            apart[name] = float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-9))
        elif ours.equal(theirs):
            apart[name] = 0.0
    return apart
