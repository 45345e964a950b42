"""Evaluations of runs whose activations are changed, by the hook and by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from capture_cases import SHAPES
from forge_train import Job, Model, Plugin, hookimpl
from forge_train.mesh.tensors import local
from forge_train_tools.testing import run_forge

HEADS = {"steer.zero_heads": ["0.1", "1.2"]}


class Marks(Plugin):
    """Adds the number of each sample and the position of each token."""

    api = (1, 0)

    @hookimpl
    def intervene(self) -> Mapping[str, Callable[..., Tensor]]:
        def marked(values: Tensor, positions: Any) -> Tensor:
            marks = 0.01 * positions.samples[:, None] + 0.1 * positions.tokens
            return values + marks[..., None]

        return {"layers.0": marked}


class ByHand(Plugin):
    """Zeroes the columns of `HEADS` in the weights, of which this rank may hold some, while the model is evaluated."""

    api = (1, 0)

    @hookimpl
    def on_start(self, model: Model, job: Job) -> None:
        self._weights = {name: one for name, one in model.named_parameters() if name.endswith("attention.o.weight")}
        self._rank = job.dist.mesh("dense", "tp").get_local_rank() if job.dist.layout.tp > 1 else 0

    @hookimpl
    def around(self, span: str) -> Any:
        return self._zeroed if span == "evaluate" else None

    @contextmanager
    def _zeroed(self) -> Iterator[None]:
        before = {name: one.detach().clone() for name, one in self._weights.items()}
        with torch.no_grad():
            for one in HEADS["steer.zero_heads"]:
                layer, head = map(int, one.split("."))
                held = local(self._weights[f"layers.{layer}.attention.o.weight"])
                size = self._weights["layers.0.attention.o.weight"].shape[1] // 4
                start = head * size - self._rank * held.shape[1]
                if 0 <= start < held.shape[1]:
                    held[:, start : start + size] = 0
        yield
        with torch.no_grad():
            for name, weight in before.items():
                self._weights[name].copy_(weight)


class Hooked(Plugin):
    """Adds a vector by a forward hook, while the model is evaluated."""

    api = (1, 0)

    @hookimpl
    def on_start(self, model: Model) -> None:
        self._on = False
        module = dict(model.named_modules())["layers.1"]
        module.register_forward_hook(lambda _, __, out: out + 2.0 * vector().to(out) if self._on else None)

    @hookimpl
    def around(self, span: str) -> Any:
        return self._adding if span == "evaluate" else None

    @contextmanager
    def _adding(self) -> Iterator[None]:
        self._on = True
        yield
        self._on = False


def vector() -> Tensor:
    return torch.linspace(-1, 1, 32)


def settings(folder: Path) -> dict[str, Any]:
    """A vector in a file, added with a factor."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"honesty": vector()}, folder / "vectors.safetensors")
    path = str(folder / "vectors.safetensors")
    return {"steer.path": path, "steer.add": ["layers.1=honesty"], "steer.factor": 2.0}


def evaluated(folder: str, model: str, plugins: list[Any], config: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The held-out losses of a run, and its other numbers."""
    own, of_model = SHAPES[model]
    classes = [CLASSES.get(one, one) for one in plugins]
    base = {"train.global_batch": 8, "train.micro_batch": 2, "train.sequence": 16, "train.evaluate_every": 1}
    both = {**base, "train.evaluate_batches": 1, **of_model, **config}
    run = run_forge([*own, *classes], both, folder=Path(folder), steps=2, **more)
    losses = [one["loss"] for one in run.events if one["event"] == "evaluation"]
    return {"run": str(run.run), "losses": losses, "numbers": run.numbers}


CLASSES: Mapping[str, type[Plugin]] = {"Marks": Marks, "ByHand": ByHand, "Hooked": Hooked}
