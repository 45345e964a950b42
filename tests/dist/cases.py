"""What the distributed tests have their ranks do: train something tiny, and say what came out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from forge_train import Batch, Job, Model, Plugin, Update, hookimpl, section
from forge_train.protocols import PrepareBatch, Span, SpanName
from forge_train.testing.runs import TinyRun, run_forge


class Probe(Plugin):
    """Keeps the first step's gradients, whole, counts what is sent, and masks labels unevenly on demand."""

    api = (1, 0)

    @section
    class Config:
        mask: bool = False
        """Mask a share of the labels that differs from sequence to sequence."""
        count: bool = True
        """Count what is sent; torch.compile does not compile where somebody looks at every operation."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.gradients: dict[str, Tensor] = {}
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
            return batch

        return prepare

    @hookimpl
    def around(self, span: SpanName, job: Job) -> Span | None:
        def counted() -> Sent:
            self.sent.append({})
            return Sent(self.sent[-1])

        return counted if span == "step" and self.config.count else None

    @hookimpl
    def on_gradients(self, update: Update) -> None:
        self.grad_norms.append(update.grad_norm.numpy().tobytes().hex())
        if self.gradients:
            return
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        self.gradients = {name: whole(gradient).clone() for name, gradient in gradients.items()}
        self.gradient_bytes = sum(size(gradient) for gradient in gradients.values())


class Sent(TorchDispatchMode):
    """Counts the bytes that this rank sends in collectives, by kind, as the best algorithm for each would."""

    KINDS: ClassVar = {
        "_allgather_base_": ("all_gather", 1.0),
        "_reduce_scatter_base_": ("reduce_scatter", 1.0),
        "allreduce_": ("all_reduce", 2.0),
    }

    FUNCTIONAL: ClassVar = {
        "all_gather_into_tensor": "all_gather",
        "reduce_scatter_tensor": "reduce_scatter",
        "all_reduce": "all_reduce",
    }

    def __init__(self, bytes_by_kind: dict[str, float]) -> None:
        super().__init__()
        self.bytes = bytes_by_kind

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional" and (kind := self.FUNCTIONAL.get(func._opname)):
            size = torch.distributed.distributed_c10d._resolve_process_group(args[-1]).size()
            held = max(t.numel() * t.element_size() for t in (args[0], out))
            factor = 2.0 if kind == "all_reduce" else 1.0
            self.bytes[kind] = self.bytes.get(kind, 0.0) + factor * held * (size - 1) / size
        if func.namespace == "c10d":
            kind, factor = self.KINDS.get(func._schema.name.removeprefix("c10d::"), ("other", 1.0))
            tensors = [t for a in args for t in (a if isinstance(a, (list, tuple)) else [a]) if isinstance(t, Tensor)]
            group = next(torch.distributed.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject))
            # The larger of input and output is what all ranks hold together.
            held = max((t.numel() * t.element_size() for t in tensors), default=0)
            self.bytes[kind] = self.bytes.get(kind, 0.0) + factor * held * (group.size() - 1) / group.size()
        return out


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
    key: str = "run",
    **more: Any,
) -> dict[str, Any]:
    """Train; rank 0 leaves weights and first gradients in `folder/key.pt`."""
    run = tiny(folder, plugins, config, sets, steps, **more)
    probe: Probe = run.plugin("probe")
    weights = {name: whole(parameter).detach() for name, parameter in run.model.named_parameters()}
    if run.job.dist.main:
        torch.save({"weights": weights, "gradients": probe.gradients}, Path(folder) / f"{key}.pt")
    state = [value for held in run.optimizer.state.values() for value in held.values() if isinstance(value, Tensor)]
    return {
        "losses": run.losses,
        "norms": [line["grad_norm"] for line in run.metrics],
        "skipped": [line.get("skipped", False) for line in run.metrics],
        "grad_norms": probe.grad_norms,
        "batches": probe.batches,
        "sent": probe.sent,
        "evaluations": [event["loss"] for event in run.events if event["event"] == "evaluation"],
        "weights": {name: digest(tensor) for name, tensor in weights.items()},
        "replicas": replicas(run.model),
        "plugins": sorted(run.job.hooks.enabled),
        "idle": sorted(set(run.job.hooks.implementers("parallelize")) - {one["plugin"] for one in composition(run)}),
        "data_rank": run.job.dist.data_rank,
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
    settings = {"train.global_batch": 12, "train.micro_batch": 1, **(config or {})}
    return run_forge((*plugins, Probe), settings, sets=sets, steps=steps, folder=Path(folder), **more)


def composition(run: TinyRun) -> list[dict[str, Any]]:
    import json

    found: list[dict[str, Any]] = json.loads((run.run / "composition.json").read_text())
    return found


def replicas(model: Model) -> dict[str, str]:
    """Parameter → which part of it this rank holds, and a hash of that: ranks with the same part have the same hash."""
    held: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        part = "all"
        if isinstance(parameter, DTensor):
            at = parameter.device_mesh.get_coordinate() or []
            split = [axis for axis, placement in enumerate(parameter.placements) if not placement.is_replicate()]
            part = ",".join(f"{axis}:{at[axis]}" for axis in split)
        held[name] = f"{part} {digest(local(parameter))}"
    return held


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

    from forge_train.distributed import DistributedContext
    from forge_train.gradients import clip, total_norm
    from forge_train.rules import Layout

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
