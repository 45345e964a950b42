"""Steps looked at from inside: what each was given, what it decided, and what it made of the weights."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from pprint import pformat
from typing import Any, Literal

import torch
from torch import Tensor

from forge_train.checkpoint.state import optimizer_state
from forge_train.checkpoint.writing import commit, stage
from forge_train.compose.initialise import local_window
from forge_train.contract.batch import MicroBatch
from forge_train.contract.events import CheckpointEvent, StepResult, Update
from forge_train.contract.protocols import Loader
from forge_train.loop.assembly import assemble
from forge_train.loop.resume import capture, restore
from forge_train.mesh.tensors import full_tensor
from forge_train.plugin import hookspecs
from forge_train.plugin.job import Hooks, Job
from forge_train.step.aggregate import split as values_of
from forge_train.step.step import Progress, Stepper, Watcher
from forge_train.store.tree import split
from forge_train_kit.evaluators import Evaluations
from forge_train_kit.model.choices import heard_by
from forge_train_kit.starting import Weights

from ..facts import DISPLAY, ROUNDS
from .fingerprints import WatchedLoader, fingerprint, hash_of
from .peak import to_peak
from .recording import Fingerprint, Record, SideEffect, gradients_file
from .routing import TIES, Counter

BEFORE_LAST = "before-last"
"""The folder of the checkpoint before the last step."""
DATA, PLUGINS = "data", "plugins"
"""The sequences of a step, and plugins' states, among what a resume may change."""


class Watched(Watcher):
    """A run's first steps, at the peak of its learning rate."""

    folder: Path | None = None
    """Folder for the full gradients of each step, written by one rank of each pipeline stage."""

    def __init__(self, job: Job) -> None:
        self.job, self.rows, self.progress = job, list[str](), Progress()
        self.seen = Record(job.dist.rank, job.dist.data_rank)
        self.first_gradients: dict[str, Tensor] = {}
        self._update: Update | None = None
        self._ended: dict[str, Any] = {}  # after the last step
        self._repeats = False
        self._random: Tensor | None = None  # when a step's first micro-batch began
        self.stepper = assemble(job, self)
        self.model, self.optimizer = self.stepper.model, self.stepper.optimizer
        self.held_out_start = self.stepper.held_out.state_dict() if self.stepper.held_out else {}
        begin(job.hooks, self.stepper)
        self.weights = Weights(job, whole=True)
        self.weights.start_extra(None)
        self.weights.start(self.model)
        to_peak(self.stepper.schedule, self.optimizer, job.steps)
        ties = (*TIES, *filter(None, (ROUNDS.of(enabled.cls) for enabled in job.hooks.enabled.values())))
        self._counter = Counter(self.model.named_modules(), self.rows, job.config.train.micro_batch, ties)
        self._around_step, self._around_evaluate = hookspecs.around("step", job), self.stepper.around_evaluate
        self.seen.start = {name: hash_of(full_tensor(tensor)) for name, tensor in self.model.state_dict().items()}
        self.seen.pieces = {
            name: local_window(parameter.detach())[1] for name, parameter in self.model.named_parameters()
        }

    def data(self, job: Job, split: Literal["train", "validation"]) -> Loader:
        return WatchedLoader(super().data(job, split), self.rows, self.seen)

    def on_micro_batch(self, micro: MicroBatch) -> None:
        if self._random is None:
            self._random = self._random_state()

    def _random_state(self) -> Tensor:
        device = self.job.device
        return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()

    def take(self, steps: int) -> None:
        """Take steps, evaluate, and write down what each gave."""
        for number in range(steps):
            if self.folder is not None and 0 < number == steps - 1:
                with hookspecs.around("save", self.job)():
                    self._write(self.folder / BEFORE_LAST)
            result = self._step()
            if self._update is not None and self._update.vetoed:
                self.seen.vetoes[str(result.step)] = self._update.vetoed
            self.seen.losses.append(float(result.loss))
            self.seen.norms.append(float(result.grad_norm))
            if result.step == 1:
                self.seen.metrics = self._observed()
            self.seen.batches.append(list(self.rows))
            self.seen.choices.append(self._counter.end())
        self.seen.weights = self._fingerprints()
        self._ended = self._whole_state() if self.folder is not None else {}
        if self.stepper.held_out is not None:
            self.evaluate()

    def _step(self) -> StepResult:
        self.model.train()
        self.rows.clear()
        with self._around_step(), heard_by(self._counter):
            result = self.stepper.run(self.progress)
        self.stepper.tell(result)
        self.job.control.take()
        return result

    def taken_again(self) -> list[str]:
        """Resume before the last step, and take it again: names of all that is different then, by a bit.

        Every rank calls this, at the end. After a single step there is nothing to resume.
        """
        if self.folder is None or not (before := self.folder / BEFORE_LAST).exists():
            return []
        self._repeats = True
        restore(self.stepper, self.progress, before, self.weights)
        self._step()
        self._counter.end()
        ended, now = self._ended, self._whole_state()
        return sorted(name for name in ended.keys() | now.keys() if ended.get(name) != now.get(name))

    @property
    def position(self) -> int:
        """Sequences that training has used, as the loader says."""
        return int(self.stepper.loader.state_dict()["sequences"])

    def _whole_state(self) -> dict[str, Any]:
        """Of this rank: the sequences of the step, and what it made of weights, buffers, optimizer and plugins."""
        tensors, rest = self.tensors()
        plugins = {f"{PLUGINS}.{name}": pformat(state) for name, state in rest[PLUGINS].items()}
        return {DATA: list(self.rows), **{name: fingerprint(tensor) for name, tensor in tensors.items()}, **plugins}

    def _observed(self) -> dict[str, float]:
        """The metrics of plugins, of all ranks together."""
        metrics = self.stepper.metrics
        found = {name: value for name, value in metrics.take().items() if name not in metrics.timings}
        numbers, histograms = values_of(found)
        bins = {f"{name}[{at}]": count for name, one in histograms.items() for at, count in enumerate(one.counts)}
        return numbers | bins

    def evaluate(self) -> None:
        """The held-out loss, and then all that a run evaluates: it gives the same, and changes nothing."""
        held_out = self.stepper.held_out
        assert held_out is not None
        with self.leaves_alone("evaluation"), self._around_evaluate():
            self.rows.clear()
            with heard_by(self._counter):
                loss, _ = self.stepper.mean_loss(held_out, self.stepper.accumulation)
            self.seen.evaluated, self.seen.decided = list(self.rows), self._counter.end()
            held_out.load_state_dict(self.held_out_start)
            found = Evaluations(self.stepper, held_out).run(self.progress.step, batches=1)
        self.seen.evaluation = [loss, found.loss]
        hooks = self.job.hooks
        for name in hooks.implementers("on_log"):
            with self.leaves_alone("evaluation", hooks.whose("on_log", name)), _silently():
                hooks.on_log(found, only=name)

    def save(self, folder: Path) -> None:
        """Write a checkpoint, as a run does."""
        hooks, step = self.job.hooks, self.progress.step
        with self.leaves_alone("checkpoint"), hookspecs.around("save", self.job)():
            for kind in ("saving", "saved"):
                for name in hooks.implementers("on_checkpoint"):
                    with self.leaves_alone("checkpoint", hooks.whose("on_checkpoint", name)), _silently():
                        hooks.on_checkpoint(CheckpointEvent(kind, step, folder), only=name)
                if kind == "saving":
                    self._write(folder)

    def _write(self, folder: Path) -> None:
        state = capture(self.stepper, self.progress, self.weights)
        commit(stage(folder, self.progress.step, state, self.job.dist), self.job.dist, beside=[])

    @contextlib.contextmanager
    def leaves_alone(self, kind: SideEffect, who: str = "") -> Iterator[None]:
        """Write down what changes of the model and the optimizer within the block, bit for bit.

        Args:
            kind: what is going on.
            who: the plugin and its hook; by default the evaluation, or the saving, itself.
        """
        before, known = self._pieces(), sum(map(len, self.seen.disturbed.get(kind, {}).values()))
        yield
        after, found = self._pieces(), self.seen.disturbed.setdefault(kind, {})
        if sum(map(len, found.values())) > known:
            return  # somebody inside, who is named, did it
        if changed := [name for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]:
            found[who] = sorted({*found.get(who, []), *changed})

    def _pieces(self) -> dict[str, Fingerprint]:
        """Of weights, buffers, and the tensors of the optimizer's state."""
        tensors: dict[str, Tensor] = {}
        split(optimizer_state(self.optimizer, self.model)["state"], "optimizer", tensors)
        return self._fingerprints() | {name: fingerprint(tensor) for name, tensor in tensors.items()}

    def _fingerprints(self) -> dict[str, Fingerprint]:
        return {name: fingerprint(tensor) for name, tensor in self.model.state_dict().items()}

    def on_backward(self, update: Update) -> Update:
        if self._repeats:
            return update
        self._update = update
        self.seen.draws |= self._random is not None and not torch.equal(self._random, self._random_state())
        self._random = None
        present = {name: p.grad.detach() for name, p in self.model.named_parameters() if p.grad is not None}
        self.seen.last_gradients = {name: fingerprint(gradient) for name, gradient in present.items()}
        if update.step == 1:
            self.seen.gradients = self.seen.last_gradients
        self.leave(update, present)
        return update

    def leave(self, update: Update, present: Mapping[str, Tensor]) -> None:
        """Keep the first step's gradients, or write each step's down for one process to continue with."""
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
        """True if this rank writes what all ranks of its stage hold."""
        dist = self.job.dist
        return dist.rank % (dist.world // dist.layout.pp) == 0

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Every tensor of the model, the optimizer and plugins as a checkpoint names it, and what else their states
        hold."""
        tensors: dict[str, Tensor] = {}
        state = capture(self.stepper, self.progress, self.weights)
        return tensors, {key: split(state[key], key, tensors) for key in ("model", "optimizer", PLUGINS)}

    def hashes(self) -> dict[str, str]:
        """Of every whole tensor of the model, the optimizer and plugins."""
        return {name: hash_of(full_tensor(tensor)) for name, tensor in sorted(self.tensors()[0].items())}


def begin(hooks: Hooks, stepper: Stepper) -> None:
    """Tell the plugins of the start. An observer that asks for neither model nor optimizer can change neither: it is
    told nothing. One that only shows the run is told no more than this."""
    for name, enabled in hooks.enabled.items():
        if enabled.observer and not hooks.arguments(name, "on_start") & {"model", "optimizer"}:
            hooks.mute(name)
    with _silently():
        hooks.on_start(stepper.model, stepper.optimizer)
    for name, enabled in hooks.enabled.items():
        if enabled.observer and DISPLAY.of(enabled.cls):
            hooks.mute(name)


def _silently() -> contextlib.AbstractContextManager[Any]:
    return contextlib.redirect_stdout(io.StringIO())
