"""What the distributed tests have their ranks do: train something tiny, and say what came out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from forge_train import Batch, BatchPhase, Job, Model, Plugin, PrepareBatch, Update, hookimpl, section
from forge_train.contract.protocols import Span, SpanName
from forge_train_tools.planning.communication import Collective, Collectives
from forge_train_tools.testing.runs import TinyRun, run_forge


class Probe(Plugin):
    """Counts what is sent and held, and masks labels unevenly on demand."""

    api = (1, 0)

    @section
    class Config:
        mask: bool = False
        """Mask a share of the labels that differs from sequence to sequence."""
        mask_all: bool = False
        """Mask every label."""
        count: bool = True
        """Count what is sent; torch.compile does not compile where somebody looks at every operation."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.gradient_bytes = 0
        self.grad_norms: list[str] = []
        self.batches: list[str] = []
        self.sent: list[dict[str, float]] = []

    @hookimpl
    def on_start(self, job: Job, model: Model, optimizer: torch.optim.Optimizer) -> None:
        self.model = model

    @hookimpl
    def prepare_batch(self, job: Job) -> PrepareBatch:
        def prepare(batch: Batch) -> Batch:
            self.batches.append(hashlib.sha256(batch.inputs.numpy().tobytes()).hexdigest()[:12])
            if self.config.mask:
                # A function of the sequence alone, so that every layout masks the same labels.
                share = batch.inputs.sum(-1, keepdim=True) % batch.labels.shape[1]
                batch.labels[torch.arange(batch.labels.shape[1]) < share] = -100
            if self.config.mask_all:
                batch.labels.fill_(-100)
            return batch

        return PrepareBatch(BatchPhase.MASK, prepare)

    @hookimpl
    def around(self, span: SpanName, job: Job) -> Span | None:
        def counted() -> Collectives:
            sent: dict[str, float] = {}
            self.sent.append(sent)

            def tell(one: Collective) -> None:
                sent[one.kind] = sent.get(one.kind, 0.0) + one.sent

            return Collectives(tell)

        return counted if span == "step" and self.config.count else None

    @hookimpl
    def on_gradients(self, update: Update) -> None:
        self.grad_norms.append(update.grad_norm.numpy().tobytes().hex())
        self.gradient_bytes = sum(size(p.grad) for p in self.model.parameters() if p.grad is not None)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def size(tensor: Tensor) -> int:
    """Bytes of what this rank holds."""
    return local(tensor).numel() * tensor.element_size()


def train(
    folder: str,
    plugins: Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
    sets: Sequence[str] = (),
    steps: int = 3,
    **more: Any,
) -> dict[str, Any]:
    """Train, and say what every number and hash came to."""
    run = tiny(folder, plugins, config, sets, steps, **more)
    probe: Probe = run.plugin("probe")
    weights = {name: whole(parameter).detach() for name, parameter in run.model.named_parameters()}
    state = [value for held in run.optimizer.state.values() for value in held.values() if isinstance(value, Tensor)]
    return {
        "losses": run.losses,
        "norms": [line["grad_norm"] for line in run.metrics],
        "grad_norms": probe.grad_norms,
        "batches": probe.batches,
        "sent": probe.sent,
        "evaluations": [event["loss"] for event in run.events if event["event"] == "evaluation"],
        "weights": {name: digest(tensor) for name, tensor in weights.items()},
        "plugins": sorted(run.job.hooks.enabled),
        "idle": sorted(set(run.job.hooks.implementers("parallelize")) - {one["plugin"] for one in composition(run)}),
        "parameter_bytes": sum(size(parameter) for parameter in run.model.parameters()),
        "gradient_bytes": probe.gradient_bytes,
        "optimizer_bytes": sum(size(value) for value in state if value.dim()),
        "run": str(run.run),
    }


def tiny(
    folder: str,
    plugins: Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
    sets: Sequence[str] = (),
    steps: int = 3,
    **more: Any,
) -> TinyRun:
    settings = {"train.global_batch": 12, "train.micro_batch": micro_batch(config or {}), **(config or {})}
    return run_forge((*plugins, Probe), settings, sets=sets, steps=steps, folder=Path(folder), **more)


def micro_batch(config: Mapping[str, Any]) -> int:
    """Two micro-batches of twelve sequences a step on each data rank, or three where two don't divide its share; twice
    as many as the stages of a pipeline, or all of one sequence."""
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    stages = config.get("parallel.pp", 1)
    share = 12 * stages * config.get("parallel.tp", 1) * config.get("parallel.cp", 1) // world
    return share // (2 * stages) if share % (2 * stages) == 0 else 1


def composition(run: TinyRun) -> list[dict[str, Any]]:
    import json

    found: list[dict[str, Any]] = json.loads((run.run / "composition.json").read_text())
    return found


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def draws(folder: str, name: str = "r", stop_at: int | None = None, steps: int = 4) -> dict[str, Any]:
    """What every rank's generators give at each step."""
    return {"drawn": tiny(folder, [f"{__name__}:Draws"], steps=steps, name=name, stop_at=stop_at).plugin("draws").drawn}


class Draws(Plugin):
    """Draws from every generator at every step."""

    api = (1, 0)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.drawn: list[list[float]] = []

    @hookimpl
    def on_gradients(self, update: Update) -> None:
        import random

        import numpy as np

        self.drawn.append([random.random(), float(np.random.rand()), float(torch.rand(()))])


def global_norm() -> dict[str, float]:
    """Gradients on two meshes, replicated, split in one and two axes, unevenly, and plain: their norm, and clipped."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from forge_train.mesh.distributed import DistributedContext
    from forge_train.mesh.layout import Layout
    from forge_train.step.step import clip, total_norm

    world = torch.distributed.get_world_size()
    root = init_device_mesh("cpu", (world,), mesh_dim_names=("world",))
    one = root._unflatten(0, (2, world // 2), ("a", "b"))
    two = root._unflatten(0, (world // 2, 2), ("c", "d"))
    generator = torch.Generator().manual_seed(0)
    wholes = [torch.randn(7, 6, generator=generator) for _ in range(6)]
    expected = torch.cat([tensor.flatten() for tensor in wholes]).norm()
    originals = [tensor.clone() for tensor in wholes]
    gradients = [
        wholes[0],
        distribute_tensor(wholes[1], root, [Shard(0)]),
        distribute_tensor(wholes[2], one, [Replicate(), Shard(1)]),
        distribute_tensor(wholes[3], one, [Shard(0), Shard(1)]),
        distribute_tensor(wholes[4], two, [Shard(1), Replicate()]),
        distribute_tensor(wholes[5], two, [Replicate(), Replicate()]),
    ]
    with DistributedContext.join(Layout(dp_shard=world), "cpu") as context:
        norm = total_norm(gradients, context)
        clip(gradients, norm, 1.0)
        after = total_norm(gradients, context)
    worst = max(float((whole(g) * norm - w).abs().max()) for g, w in zip(gradients, originals, strict=True))
    return {"norm": float(norm), "expected": float(expected), "clipped": float(after), "worst": worst}


def along_axes() -> dict[str, Any]:
    """What a rank of dp 2 × tp 2 gathers along each axis, of tensors of its own shape, and where its data is."""
    from forge_train.mesh.distributed import DistributedContext
    from forge_train.mesh.layout import Layout

    with DistributedContext.join(Layout(dp_shard=2, tp=2), "cpu") as context:
        mine = torch.full((context.rank + 1,), context.rank)
        axes = ("", "tp", "dp_shard", "data", "dp", "efsdp")
        found = {axis: [one.tolist() for one in context.gather_tensors(mine, axis)] for axis in axes}
        summed = int(context.all_reduce(torch.tensor(context.rank), axis="dp"))
        return {"found": found, "data": (context.data_rank, context.data_ranks), "summed": summed}
