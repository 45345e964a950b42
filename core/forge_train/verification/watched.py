"""Steps looked at from inside: what each was given, what it decided, and what it made of the weights."""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ..choices import heard_by
from ..composition.compose import compose
from ..composition.initialise import local_window
from ..events import Update
from ..job import Job
from ..loop.gradients import full
from ..loop.step import Counts, Progress, Stepper
from ..protocols import Batch, Loader
from ..registry.hooks import Hooks
from ..storage.resume import capture, load_initial
from ..storage.state import split
from .peak import to_peak
from .recording import Fingerprint, Record, gradients_file
from .routing import Counter


class Watched(Stepper):
    """A run's first steps, at the peak of its learning rate."""

    folder: Path | None = None
    """Where the gradients of each step are left, whole; by one rank of each stage of a pipeline."""

    @classmethod
    def of(cls, job: Job) -> Self:
        """Compose a run, and have plugins begin it."""
        model = compose(job).model
        optimizer = job.hooks.optimizer(model)
        loader = WatchedLoader(job.hooks.build_data("train"), [])
        stepper = cls(job, model, optimizer, job.hooks.lr_schedule(optimizer), loader)
        held_out = job.hooks.build_data("validation") if job.config.train.evaluate_every else None
        _begin(job.hooks, stepper)
        load_initial(model, job)
        to_peak(stepper.schedule, optimizer, job.steps)
        stepper.watch(loader.rows, held_out)
        return stepper

    def watch(self, rows: list[str], held_out: Loader | None) -> None:
        self.seen = Record(self.job.dist.rank, self.job.dist.data_rank)
        self.gradients: dict[str, Tensor] = {}
        self.progress = Progress()
        self._rows = rows
        self._held_out = WatchedLoader(held_out, rows) if held_out else None
        self._before = held_out.state_dict() if held_out else {}
        self._counter = Counter(self.model.named_modules(), rows, self.job.config.train.micro_batch)
        self._around_step = self.job.hooks.span("step")
        self._around_evaluate = self.job.hooks.span("evaluate")
        self.seen.start = {name: hash_of(full(tensor)) for name, tensor in self.model.state_dict().items()}
        self.seen.pieces = {
            name: local_window(parameter.detach())[1] for name, parameter in self.model.named_parameters()
        }

    def take(self, steps: int) -> None:
        """Take steps, evaluate, and write down what each gave."""
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
        self.seen.weights = self._fingerprints()
        if self._held_out is not None:
            self._evaluate(self._held_out)

    def _evaluate(self, held_out: WatchedLoader) -> None:
        """Once as a run does, and once more: that gives the same and changes nothing, or it is no evaluation."""
        for _ in range(2):
            self._rows.clear()
            held_out.load_state_dict(self._before)
            with self._around_evaluate(), heard_by(self._counter):
                self.seen.evaluation.append(self.evaluate(held_out, self.accumulation)[0])
            self.seen.evaluated = list(self._rows)
            self.seen.decided = self._counter.end()
        after = self._fingerprints()
        self.seen.disturbed = [name for name, before in self.seen.weights.items() if after[name] != before]

    def _fingerprints(self) -> dict[str, Fingerprint]:
        return {name: fingerprint(tensor) for name, tensor in self.model.state_dict().items()}

    def _backward(self, step: int, batches: Sequence[Batch], counts: Counts) -> Update:
        update = super()._backward(step, batches, counts)
        present = {name: p.grad.detach() for name, p in self.model.named_parameters() if p.grad is not None}
        self.seen.last_gradients = {name: fingerprint(gradient) for name, gradient in present.items()}
        if step == 1:
            self.seen.gradients = self.seen.last_gradients
        self.leave(step, update, present)
        return update

    def leave(self, step: int, update: Update, present: Mapping[str, Tensor]) -> None:
        """Keep the first step's gradients, or write each step's down for one process to go on with."""
        if self.folder is None:
            if step == 1:
                self.gradients = {name: gradient.cpu().clone() for name, gradient in present.items()}
            return
        gradients = {}
        for name, gradient in present.items():
            whole = full(gradient)
            if self.keeps:
                gradients[name] = whole.cpu()
        if self.keeps:
            file = gradients_file(self.folder, step, self.job.dist.rank)
            torch.save({"gradients": gradients, "norm": update.grad_norm.cpu()}, file)

    @property
    def keeps(self) -> bool:
        """Whether this rank leaves what all of its stage hold."""
        dist = self.job.dist
        return dist.rank % (dist.world // dist.layout.pp) == 0

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Every tensor of the model and the optimizer as a checkpoint names it, and the optimizer's other state."""
        tensors: dict[str, Tensor] = {}
        state = capture(self, self.progress)
        rest = {key: split(state[key], key, tensors) for key in ("model", "optimizer")}
        return tensors, rest["optimizer"]

    def hashes(self) -> dict[str, str]:
        """Of every whole tensor of the model and the optimizer."""
        return {name: hash_of(full(tensor)) for name, tensor in sorted(self.tensors()[0].items())}


def _begin(hooks: Hooks, stepper: Stepper) -> None:
    """Tell the plugins of the start. A logger asks for neither model nor optimizer, and is not told; another observer
    could change them, and is told of this and no more."""
    observers = [name for name, enabled in hooks.enabled.items() if enabled.observer]
    for name in observers:
        if not hooks.arguments(name, "on_start") & {"model", "optimizer"}:
            hooks.mute(name)
    with contextlib.redirect_stdout(io.StringIO()):
        hooks.on_start(stepper.model, stepper.optimizer)
    for name in observers:
        hooks.mute(name)


class WatchedLoader:
    """A loader that remembers what it gave, sequence by sequence, in `rows`."""

    def __init__(self, loader: Loader, rows: list[str]) -> None:
        self._loader = loader
        self.rows = rows

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
                    digest.update(f"{name}{hash_of(tensor[row])}".encode())
            self.rows.append(digest.hexdigest()[:16])
        return batch

    def state_dict(self) -> dict[str, Any]:
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)

    def skip(self, sequences: int) -> None:
        self._loader.skip(sequences)


def fingerprint(tensor: Tensor) -> Fingerprint:
    """The piece of a tensor that lies here: a DTensor's by its mesh coordinates along the axes that shard it."""
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return "whole", hash_of(tensor)
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    names = mesh.mesh_dim_names or range(mesh.ndim)
    sharded = [
        f"{name}={place}"
        for name, place, kind in zip(names, mesh.get_coordinate(), placements, strict=True)
        if not kind.is_replicate() and mesh.size(list(names).index(name)) > 1
    ]
    return " ".join(sharded) or "whole", hash_of(tensor.to_local())  # type: ignore[attr-defined]


def hash_of(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]
