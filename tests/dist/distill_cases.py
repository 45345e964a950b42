"""An outside task that learns from a teacher, frozen or trained beside it, and what its tests have the ranks do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

import cases
import toys
from forge_train import MASKED, Batch, Job, Plugin, Update, hookimpl, section
from forge_train_kit.contract import ExtraModel
from forge_train_tools.testing import TinyRun, run_forge


class Distill(Plugin):
    """Cross-entropy, and the divergence from a teacher (arXiv:1503.02531); a trained teacher learns the labels."""

    api = (1, 0)

    @section
    class Config:
        weights: str = ""
        trained: bool = False
        without: tuple[str, ...] = ()
        teacher: dict[str, dict[str, Any]] = field(default_factory=dict)
        """Sections of the teacher that differ from the student's."""

    @hookimpl
    def extra_models(self, job: Job) -> Iterable[ExtraModel]:
        own = self.config
        yield ExtraModel("teacher", own.teacher, own.weights, trained=own.trained, without=own.without)

    @hookimpl
    def task(self, job: Job) -> Distillation:
        return Distillation(job)


class Distillation(toys.ToyTask):
    def __init__(self, job: Job) -> None:
        self.teacher, (self.part,) = job.models["teacher"], job.models["teacher"].parts

    def loss(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        said = self.outputs(self.part, self.teacher(batch.inputs), batch)
        mine = self.outputs(part, hidden, batch)
        kept = (batch.labels != MASKED).unsqueeze(-1)
        divergence = F.kl_div(mine.log_softmax(-1), said.detach().softmax(-1), reduction="none") * kept
        labels = [F.cross_entropy(one.flatten(0, 1), batch.labels.flatten(), reduction="sum") for one in (mine, said)]
        return sum(labels[: 1 + said.requires_grad], divergence.sum())


class Gradients(Plugin):
    """Keeps the first step's gradients."""

    api = (1, 0)

    @hookimpl
    def on_start(self, job: Job, model: Any, optimizer: Any) -> None:
        self.job, self.model, self.first = job, model, {}

    @hookimpl
    def on_gradients(self, update: Update) -> None:
        if self.first:
            return
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                self.first[name] = cases.whole(parameter.grad).double().norm().item()
        extra = [parameter for model in self.job.models.values() for parameter in model.parameters()]
        self.bytes = sum(cases.size(p.grad) for p in extra if p.grad is not None)
        self.held = sum(_stored(parameter) for parameter in extra)


def _stored(parameter: Tensor) -> int:
    return cases.local(parameter).untyped_storage().nbytes()


def distilled(
    folder: str,
    plugins: Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
    steps: int = 4,
    task: bool = True,
    **more: Any,
) -> dict[str, Any]:
    """Train a tower with a teacher, or a teacher alone, and say what a rank came to."""
    values = {**toys.SMALL, "train.micro_batch": 1, "train.clip_norm": 0.3, "train.evaluate_every": 2, **(config or {})}
    own = ["distill_cases:Distill"] if task else []
    wanted = [*toys.TOYS, "toys:Noise", *own, "distill_cases:Gradients", *plugins]
    run: TinyRun = run_forge(wanted, values, steps=steps, preset="", folder=Path(folder), **more)
    models = {"": run.model, **run.job.models}
    gradients = run.plugin("gradients")
    return {
        "losses": run.losses,
        "norms": [line["grad_norm"] for line in run.metrics],
        "evaluations": [event["loss"] for event in run.events if event["event"] == "evaluation"],
        "gradients": gradients.first,
        "extra_gradient_bytes": gradients.bytes,
        "extra_bytes": gradients.held,
        "states": len(run.optimizer.state),
        "weights": {
            f"{prefix}:{name}": cases.digest(cases.whole(tensor))
            for prefix, model in models.items()
            for name, tensor in model.named_parameters()
        },
        "placements": sorted(
            {str(getattr(p, "placements", "")) for m in run.job.models.values() for p in m.parameters()}
        ),
        "training": [part.training for model in run.job.models.values() for part in model.parts],
        "report": cases.composition(run),
        "run": str(run.run),
    }
