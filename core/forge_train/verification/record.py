"""The first steps of a run, with everything written down that two layouts must have in common."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..choices import heard_by
from ..composition.compose import compose
from ..composition.model import Model
from ..config import Request
from ..config.rules import Layout
from ..events import Update
from ..job import Job
from ..loop.control import Control
from ..loop.engine import prepare_process
from ..loop.gradients import full
from ..loop.step import Counts, Progress, Stepper
from ..processes.distributed import DistributedContext
from ..processes.world import World
from ..protocols import Batch, Loader
from ..registry.setup import Setup, resolve
from ..storage import checkpoint
from ..storage.resume import capture, load_initial, restore
from ..storage.run import Run, plugin_list, write_json
from ..storage.state import split
from ..strict_json import loads
from .routing import Counter, Step, Tally

Fingerprint = tuple[str, str]
"""Which piece of a tensor a rank holds, and a hash of its bytes: equal pieces must have equal hashes."""


@dataclass
class Record:
    """What one rank saw."""

    rank: int
    data_rank: int
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    batches: list[list[str]] = field(default_factory=list)
    """For each step, a hash of each sequence."""
    start: dict[str, str] = field(default_factory=dict)
    """Name → hash of the whole initial weight."""
    gradients: dict[str, Fingerprint] = field(default_factory=dict)
    """Of the first step."""
    weights: dict[str, Fingerprint] = field(default_factory=dict)
    """After the last step, persistent buffers too."""
    saved: dict[str, str] = field(default_factory=dict)
    """Name → hash of every whole tensor that was saved."""
    choices: list[Step] = field(default_factory=list)
    """For each step, what the model has decided."""


@dataclass
class Recording:
    """A run of some steps, on all its ranks."""

    ranks: list[Record]
    gradients: dict[str, Tensor]
    """Whole gradients of the first step, before clipping; a parameter without one is left out."""
    parameters: dict[str, str]
    """Name → role, empty where the model declares none."""
    layout: Layout = field(default_factory=Layout)
    precision: str = "fp32"
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """Persistent buffers after the last step: what a model keeps beside its parameters, such as a router's bias."""

    @property
    def first(self) -> Record:
        return self.ranks[0]

    @classmethod
    def read(cls, folder: Path, setup: Setup, world: int) -> Recording:
        """What the processes of a layout have left in a folder."""
        ranks = []
        for rank in range(world):
            values = loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8"))
            for name in ("gradients", "weights"):
                values[name] = {key: tuple(value) for key, value in values[name].items()}
            values["choices"] = [{key: Tally(**one) for key, one in step.items()} for step in values["choices"]]
            ranks.append(Record(**values))
        gradients: dict[str, Tensor] = {}
        parameters: dict[str, str] = {}
        buffers: dict[str, Tensor] = {}
        for file in sorted(folder.glob("gradients-*.pt")):
            stage = torch.load(file, weights_only=True)
            gradients |= stage["gradients"]
            parameters |= stage["parameters"]
            buffers |= stage["buffers"]
        config = setup.config
        layout = Layout.of(config.parallel, world)
        return cls(ranks, gradients, parameters, layout, config.train.precision, buffers)


def worker(request: dict[str, Any], steps: int, folder: str) -> dict[str, Any]:
    """What each process of a layout does."""
    lists = {name: tuple(request[name]) for name in ("plugins", "without", "set")}
    setup = resolve(Request(**{**request, **lists}), world=World.here().size)
    record(setup, steps, Path(folder))
    return {"code": 0}


def record(
    setup: Setup, steps: int, folder: Path, *, compare_with: Path | None = None, rounding: bool = True
) -> Recording | None:
    """Take some steps and write down what happened; every rank of a layout calls this.

    Args:
        setup: the configuration.
        steps: how many, from the start.
        folder: where the records of several ranks go, and a checkpoint at the end.
        compare_with: the checkpoint of another layout, to load instead of saving one, and to say what it holds.
        rounding: whether plugins that round below the run's precision do so.

    Returns:
        the recording in one process; on several ranks, `Recording.read` gives it to whoever started them.
    """
    config, hooks = setup.config, setup.hooks
    for enabled in hooks.enabled.values():
        if enabled.observer or (enabled.cls.rounds and not rounding):
            hooks.mute(enabled.name)
    layout = Layout.of(config.parallel, World.here().size)
    with DistributedContext.join(layout, config.run.device, timeout=config.run.start_timeout) as dist:
        dist.agree({**config.values(), **{f"plugin {entry['name']}": entry for entry in plugin_list(hooks)}})
        job = Job(config, hooks, Run(folder / "run"), dist, Control(dist))
        hooks.bind(job)
        prepare_process(job)
        watched = _Watched.of(job)
        watched.take(min(steps, job.steps))
        parameters = {name: watched.model.roles.get(name, "") for name, _ in watched.model.named_parameters()}
        state = watched.model.state_dict().items()
        buffers = {name: tensor.cpu().clone() for name, tensor in state if name not in parameters}
        if compare_with is not None:
            restore(watched, watched.progress, compare_with)
        elif dist.world > 1:
            checkpoint.write(folder / "checkpoint", steps, capture(watched, watched.progress), dist, beside=[])
        watched.seen.saved = watched.hashes()
        if dist.world == 1:
            return Recording([watched.seen], watched.gradients, parameters, layout, config.train.precision, buffers)
        write_json(folder / f"rank-{dist.rank}.json", asdict(watched.seen))
        if dist.rank % (dist.world // layout.pp) == 0:  # one of each stage: they hold the same names
            stage = {"gradients": watched.gradients, "parameters": parameters, "buffers": buffers}
            torch.save(stage, folder / f"gradients-{dist.rank}.pt")
        dist.barrier()
    return None


class _Watched(Stepper):
    """Steps, looked at from inside."""

    @classmethod
    def of(cls, job: Job) -> _Watched:
        """Compose a run."""
        model = compose(job).model
        optimizer = job.hooks.optimizer(model)
        loader = _WatchedLoader(job.hooks.build_data("train"))
        stepper = cls(job, model, optimizer, job.hooks.lr_schedule(optimizer), loader)
        job.hooks.on_start(model, optimizer)
        load_initial(model, job)
        stepper.begin(loader)
        return stepper

    def begin(self, loader: _WatchedLoader) -> None:
        self.seen = Record(self.job.dist.rank, self.job.dist.data_rank)
        self.gradients: dict[str, Tensor] = {}
        self.progress = Progress()
        self._rows = loader.rows
        self._counter = Counter(self.model.named_modules(), loader.rows, self.job.config.train.micro_batch)
        self._around_step = self.job.hooks.span("step")
        self.seen.start = {name: _hash(full(tensor)) for name, tensor in self.model.state_dict().items()}

    def take(self, steps: int) -> None:
        """Take steps, and write down what each gave."""
        self.model.train()
        for _ in range(steps):
            self._rows.clear()
            with self._around_step(), heard_by(self._counter):
                result = self.run(self.progress)
            self.job.hooks.on_step(result)
            self.job.control.take()
            self.seen.losses.append(float(result.loss))
            self.seen.norms.append(float(result.grad_norm))
            self.seen.batches.append(list(self._rows))
            self.seen.choices.append(self._counter.end())
        for name, tensor in self.model.state_dict().items():
            self.seen.weights[name] = _fingerprint(tensor)

    def _backward(self, step: int, batches: Sequence[Batch], counts: Counts) -> Update:
        update = super()._backward(step, batches, counts)
        if step == 1:
            self._look(self.model)
        return update

    def _look(self, model: Model) -> None:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradient = parameter.grad.detach()
                self.seen.gradients[name] = _fingerprint(gradient)
                self.gradients[name] = full(gradient).float().cpu().clone()

    def hashes(self) -> dict[str, str]:
        """Of every whole tensor of the model and the optimizer, as a checkpoint names them."""
        tensors: dict[str, Tensor] = {}
        state = capture(self, self.progress)
        for key in ("model", "optimizer"):
            split(state[key], key, tensors)
        return {name: _hash(full(tensor)) for name, tensor in sorted(tensors.items())}


class _WatchedLoader:
    """A loader that remembers what it gave, sequence by sequence."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self.rows: list[str] = []

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self._loader)
        parts: Mapping[str, Tensor | None] = {
            "inputs": batch.inputs,
            "labels": batch.labels,
            "positions": batch.positions,
            "documents": batch.documents,
            **batch.extras,
        }
        for row in range(len(batch.inputs)):
            digest = hashlib.sha256()
            for name, tensor in sorted(parts.items()):
                if tensor is not None:
                    digest.update(f"{name}{_hash(tensor[row])}".encode())
            self.rows.append(digest.hexdigest()[:16])
        return batch

    def state_dict(self) -> dict[str, Any]:
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)

    def skip(self, sequences: int) -> None:
        self._loader.skip(sequences)


def _fingerprint(tensor: Tensor) -> Fingerprint:
    """The piece of a tensor that lies here: a DTensor's by its mesh coordinates along the axes that shard it."""
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return "whole", _hash(tensor)
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    names = mesh.mesh_dim_names or range(mesh.ndim)
    sharded = [
        f"{name}={place}"
        for name, place, kind in zip(names, mesh.get_coordinate(), placements, strict=True)
        if not kind.is_replicate() and mesh.size(list(names).index(name)) > 1
    ]
    return " ".join(sharded) or "whole", _hash(tensor.to_local())  # type: ignore[attr-defined]


def _hash(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]
