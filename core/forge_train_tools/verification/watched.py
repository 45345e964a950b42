"""Steps looked at from inside: what each was given, what it decided, and what it made of the weights."""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from forge_train.composition.initialise import local_window
from forge_train.contract.batch import Batch
from forge_train.contract.choices import heard_by
from forge_train.contract.events import Update
from forge_train.contract.hooks import Hooks
from forge_train.contract.job import Job
from forge_train.contract.protocols import Loader
from forge_train.ground.tensors import full_tensor, local
from forge_train.loop.assembly import assemble
from forge_train.loop.resume import capture
from forge_train.loop.step import Progress, Stepper, Watcher
from forge_train.loop.weights import load_extra, load_initial
from forge_train.storage.tree import split

from .peak import to_peak
from .recording import Fingerprint, Record, gradients_file
from .routing import TIES, Counter


class Watched(Watcher):
    """A run's first steps, at the peak of its learning rate."""

    folder: Path | None = None
    """Where the gradients of each step are left, whole; by one rank of each stage of a pipeline."""

    def __init__(self, job: Job) -> None:
        self.job, self.rows, self.progress = job, list[str](), Progress()
        self.seen = Record(job.dist.rank, job.dist.data_rank)
        self.first_gradients: dict[str, Tensor] = {}
        self.stepper = assemble(job, self)
        self.model, self.optimizer = self.stepper.model, self.stepper.optimizer
        _begin(job.hooks, self.stepper)
        load_extra(job)
        load_initial(self.model, job)
        to_peak(self.stepper.schedule, self.optimizer, job.steps)
        ties = (*TIES, *(enabled.cls.rounds for enabled in job.hooks.enabled.values() if enabled.cls.rounds))
        self._counter = Counter(self.model.named_modules(), self.rows, job.config.train.micro_batch, ties)
        self._around_step, self._around_evaluate = job.hooks.span("step"), job.hooks.span("evaluate")
        self.seen.start = {name: hash_of(full_tensor(tensor)) for name, tensor in self.model.state_dict().items()}
        self.seen.pieces = {
            name: local_window(parameter.detach())[1] for name, parameter in self.model.named_parameters()
        }

    def data(self, job: Job, split: Literal["train", "validation"]) -> Loader:
        return WatchedLoader(super().data(job, split), self.rows)

    def take(self, steps: int) -> None:
        """Take steps, evaluate, and write down what each gave."""
        self.model.train()
        for _ in range(steps):
            self.rows.clear()
            with self._around_step(), heard_by(self._counter):
                result = self.stepper.run(self.progress)
            self.job.hooks.on_step(result)
            self.job.control.take()
            self.seen.losses.append(float(result.loss))
            self.seen.norms.append(float(result.grad_norm))
            self.seen.batches.append(list(self.rows))
            self.seen.choices.append(self._counter.end())
        self.seen.weights = self._fingerprints()
        if self.stepper.held_out is not None:
            self.evaluate()

    def evaluate(self) -> None:
        """Once as a run does, and once more: that gives the same and changes nothing, or it is no evaluation."""
        for _ in range(2):
            self.rows.clear()
            with self._around_evaluate(), heard_by(self._counter):
                self.seen.evaluation.append(self.stepper.evaluate(self.stepper.accumulation)[0])
            self.seen.evaluated = list(self.rows)
            self.seen.decided = self._counter.end()
        after = self._fingerprints()
        self.seen.disturbed = [name for name, before in self.seen.weights.items() if after[name] != before]

    def _fingerprints(self) -> dict[str, Fingerprint]:
        return {name: fingerprint(tensor) for name, tensor in self.model.state_dict().items()}

    def on_backward(self, update: Update) -> Update:
        present = {name: p.grad.detach() for name, p in self.model.named_parameters() if p.grad is not None}
        self.seen.last_gradients = {name: fingerprint(gradient) for name, gradient in present.items()}
        if update.step == 1:
            self.seen.gradients = self.seen.last_gradients
        self.leave(update, present)
        return update

    def leave(self, update: Update, present: Mapping[str, Tensor]) -> None:
        """Keep the first step's gradients, or write each step's down for one process to go on with."""
        if self.folder is None:
            if update.step == 1:
                self.first_gradients = {name: gradient.cpu().clone() for name, gradient in present.items()}
            return
        gradients = {}
        for name, gradient in present.items():
            whole = full_tensor(gradient)
            if self.keeps:
                gradients[name] = whole.cpu()
        if self.keeps:
            file = gradients_file(self.folder, update.step, self.job.dist.rank)
            torch.save({"gradients": gradients, "norm": update.grad_norm.cpu()}, file)

    @property
    def keeps(self) -> bool:
        """Whether this rank leaves what all of its stage hold."""
        dist = self.job.dist
        return dist.rank % (dist.world // dist.layout.pp) == 0

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Every tensor of the model and the optimizer as a checkpoint names it, and the optimizer's other state."""
        tensors: dict[str, Tensor] = {}
        state = capture(self.stepper, self.progress)
        rest = {key: split(state[key], key, tensors) for key in ("model", "optimizer")}
        return tensors, rest["optimizer"]

    def hashes(self) -> dict[str, str]:
        """Of every whole tensor of the model and the optimizer."""
        return {name: hash_of(full_tensor(tensor)) for name, tensor in sorted(self.tensors()[0].items())}


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
        for row in range(len(batch.inputs)):
            one, digest = batch.cut("batch", partial(_row, row)), hashlib.sha256()
            for name, tensor in sorted(one.tensors().items()):
                digest.update(f"{name}{hash_of(tensor)}".encode())
            self.rows.append(digest.hexdigest()[:16])
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # such as `on_model`, which a loader need not have

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
    return " ".join(sharded) or "whole", hash_of(local(tensor))


def hash_of(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]


def _row(number: int, tensor: Tensor, dim: int) -> Tensor:
    return tensor.select(dim, number)
