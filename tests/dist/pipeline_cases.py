"""An outside pipeline: two processes hold half of a tower each; all micro-batches go forward before one comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import cases
import toys
from forge_train import Applied, Batch, Job, MicroBatch, Model, Phase, Plugin, Transform, hookimpl
from forge_train_kit.pipeline import Timetable
from forge_train_tools.testing import TinyRun


class Stages(Plugin):
    """A pipeline of two processes."""

    api = (1, 0)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.told: list[MicroBatch] = []

    @hookimpl
    def parallelize(self, job: Job) -> Transform | None:
        if job.dist.layout.pp == 1:
            return None
        stage = job.dist.mesh("dense", "pp").get_local_rank()

        def apply(whole: nn.Module) -> Applied:
            part = toys.halves(whole)[stage]
            return Applied(part, tuple(part.units), f"stage {stage}", on_micro_batch=self.told.append)

        return Transform(Phase.PIPELINE, "pipeline", apply, covers=("pp",))

    @hookimpl
    def executor(self, model: Model, task: Any, job: Job) -> Any:
        return Pipeline(model, task, job) if job.dist.layout.pp > 1 else toys.TwoPartExecutor(model, task)


class Pipeline:
    """All micro-batches forward, then all of them backward."""

    def __init__(self, model: Model, task: Any, job: Job) -> None:
        self.model, self.task, (self.part,) = model, task, model.parts
        mesh = job.dist.mesh("dense", "pp")
        self.group, self.last = mesh.get_group(), mesh.get_local_rank() == 1
        self.other = dist.get_global_rank(self.group, 0 if self.last else 1)

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if not self.last:
            out = self.part(batch.inputs)
            dist.send(out.detach(), self.other, group=self.group)
            return out, out
        x = torch.full((*batch.inputs.shape, toys.DIM), torch.nan)
        dist.recv(x, self.other, group=self.group)
        x.requires_grad_(torch.is_grad_enabled())
        return x, self.task.loss(self.part, self.part(x), batch)

    def timetable(self, micro_batches: int) -> Timetable:
        return Timetable.from_csv(
            "\n".join(
                ",".join(f"{rank}{work}{index}" for work in "FB" for index in range(micro_batches)) for rank in (0, 1)
            )
        )

    def train(self, batches: Sequence[Batch], scale: Tensor | float) -> Tensor:
        passed, total = [], torch.zeros(())
        for index, batch in enumerate(batches, start=1):
            self.model.on_micro_batch(index == len(batches), direction="forward")
            passed.append(self._forward(batch))
        for index, (edge, out) in enumerate(passed, start=1):
            self.model.on_micro_batch(index == len(batches), direction="backward")
            if self.last:
                torch.autograd.backward(out * scale)
                dist.send(edge.grad, self.other, group=self.group)
                total = total + out.detach()
            else:
                gradient = torch.full_like(out, torch.nan)
                dist.recv(gradient, self.other, group=self.group)
                torch.autograd.backward(out, gradient)
        return total

    def evaluate(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            loss = self._forward(batch)[1]
        return loss if self.last else torch.zeros(())


def staged(
    folder: str,
    plugins: Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
    steps: int = 4,
    **more: Any,
) -> dict[str, Any]:
    """Train a tower of three blocks, and say what each rank came to."""
    values = {
        **toys.SMALL,
        "toy_model.layers": 3,
        "train.micro_batch": 1,
        "train.clip_norm": 0.3,
        "train.evaluate_every": 2,
        "log.peak_tflops": 1.0,
        **(config or {}),
    }
    run: TinyRun = toys.run_forge(
        [*toys.TOYS, "pipeline_cases:Flops", "toys:Noise", "toys:Average", "pipeline_cases:Stages", "mfu", *plugins],
        values, steps=steps, preset="", folder=Path(folder), **more,
    )  # fmt: skip
    weights = {name: cases.whole(parameter).detach() for name, parameter in run.model.named_parameters()}
    state = {
        f"{name} {key}": value
        for name, parameter in run.model.named_parameters()
        for key, value in run.optimizer.state[parameter].items()
        if isinstance(value, Tensor)
    }
    return {
        "losses": run.losses,
        "norms": [line["grad_norm"] for line in run.metrics],
        "mfu": run.plugin("mfu").share,
        "evaluations": [event["loss"] for event in run.events if event["event"] == "evaluation"],
        "weights": {name: tensor.double().norm().item() for name, tensor in weights.items()},
        "digests": {name: cases.digest(tensor) for name, tensor in weights.items()},
        "state": {name: cases.digest(cases.whole(tensor).reshape(-1)) for name, tensor in state.items()},
        "average": sorted(run.plugin("average").average),
        "matched": [one["matched"] for one in cases.composition(run)],
        "told": [(one.last, one.part, one.direction) for one in run.plugin("stages").told],
        "run": str(run.run),
    }


class Flops(Plugin):
    """The tower's own count, by what lies on this rank."""

    api = (1, 0)

    @hookimpl
    def parallelize(self, job: Job) -> Transform:
        def apply(part: Any) -> Applied:
            part.flops_per_token = lambda sequence: 6.0 * sum(p.numel() for p in part.parameters())
            return Applied(part, ("",))

        return Transform(Phase.ADAPT, "flops", apply)


class Grows(Plugin):
    """Adds a low-rank update to the second stage alone."""

    api = (1, 0)

    @hookimpl
    def parallelize(self, job: Job) -> Transform:
        def apply(part: Any) -> Applied:
            if "2" not in part.layers:
                return Applied(part)
            block = part.layers["2"]
            block.up = toys.LowRank(block.up, 2)
            return Applied(part, ("layers.2.up",), added=("layers.2.up.down", "layers.2.up.up"))

        return Transform(Phase.ADAPT, "grows", apply)
