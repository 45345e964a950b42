"""Replays one recorded step of a run: its batch, each token's loss, and each parameter's gradient norm."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forge_train.base.errors import ConfigError
from forge_train.checkpoint import checkpoint
from forge_train.checkpoint.found import left_out, newest
from forge_train.checkpoint.seal import ALONE
from forge_train.contract.batch import MASKED, Batch
from forge_train.loop.assembly import assemble, prepare_process
from forge_train.loop.resume import restore
from forge_train.mesh.distributed import DistributedContext
from forge_train.mesh.layout import Device, Layout
from forge_train.mesh.process_group import choose_device
from forge_train.mesh.tensors import local
from forge_train.plugin import hookspecs
from forge_train.plugin.job import Job
from forge_train.registry.setup import Setup
from forge_train.run import records
from forge_train.run.run import Run, is_run
from forge_train.step.forward import close
from forge_train.step.step import Progress, Stepper
from forge_train_kit.starting import Weights

from ..configuration.request import Request, one_process
from ..configuration.setup import resolve
from .opening import Wanted, setup_of


@dataclass(frozen=True)
class Row:
    """One sequence of the step's batch."""

    inputs: list[int]
    """Token ids."""
    labels: list[int]
    """The target at each position; -100 is masked."""
    losses: list[float | None] = field(default_factory=list)
    """The loss at each position, in evaluation mode; None if masked. Empty if the head gives no token logits."""


@dataclass(frozen=True)
class Replayed:
    """A replayed step."""

    run: str
    step: int
    checkpoint: str
    """The checkpoint it started from; empty for the run's initial weights."""
    repeated: int
    """Steps that were repeated from there."""
    data_range: tuple[int, int]
    """The step's global sequences."""
    loss: float
    grad_norm: float
    recorded_loss: float | None
    """The values in metrics.jsonl; None for a step that was not logged."""
    recorded_grad_norm: float | None
    gradients: dict[str, float]
    """Parameter → 2-norm of its gradient."""
    sequences: list[Row]


def replay(run: Path, step: int, *, settings: Sequence[str] = (), device: Device | None = None) -> Replayed:
    """Repeat a step of a run on this process, from the newest checkpoint before it. Writes nothing into the run.

    Args:
        run: its folder.
        step: from 1.
        settings: values that override the run's, such as `train.micro_batch=1`.
        device: the device to use; by default the one it was trained on, or else one of this machine.

    Raises:
        ConfigError: for a folder that is not a run, or a step that it does not have.
    """
    if not is_run(run):
        raise ConfigError(f"{run} is not a run. Name the folder that contains its config.toml.")
    found = newest(run / "checkpoints", ALONE, before=step)
    setup = _setup(run, found.path if found else None, tuple(settings))
    steps = setup.config.train.total_steps
    if not 1 <= step <= steps:
        raise ConfigError(f"{run} has steps 1 to {steps}, not {step}.")
    with tempfile.TemporaryDirectory(prefix="forge-debug-") as folder:
        dist = DistributedContext(Layout(), choose_device(device or setup.config.run.device))
        job = Job.of(setup.config, setup.hooks, Run(Path(folder)), dist)
        job.run.open()
        prepare_process(job)
        stepper, progress = assemble(job), Progress()
        try:
            _begin(stepper, progress, run, found.path if found else None)
            first = progress.step
            while progress.step < step - 1:
                job.hooks.on_step(stepper.run(progress))
            return _look(stepper, progress, run, found.path.name if found else "", step - 1 - first)
        finally:
            close(stepper.loader)


def _setup(run: Path, path: Path | None, settings: tuple[str, ...]) -> Setup:
    """The run's configuration for one process, without plugins that only observe or define a layout.

    Without a checkpoint, the run starts again, from the same weights.
    """
    wanted = Wanted(set=settings)
    if path is not None:
        return setup_of(path, checkpoint.read_state(path), wanted=wanted)
    request = Request(config=str(run / "config.toml"), set=settings)
    whole = resolve(dataclasses.replace(request, set=(*one_process(request), *settings)))
    kept = {*whole.hooks.enabled} - whole.config.neutral | {*whole.hooks.implementers("initial_weights")}
    enabled = [{"name": name} for name in sorted(kept)]
    return setup_of(run, {"enabled": enabled}, wanted=wanted)


def _begin(stepper: Stepper, progress: Progress, run: Path, path: Path | None) -> None:
    job, model = stepper.job, stepper.model
    job.hooks.on_start(model, stepper.optimizer)
    weights = Weights(job)
    weights.start_extra(path)
    if path is not None:
        restore(stepper, progress, path, weights)
        progress.left_out = sorted({*progress.left_out, *left_out(run)})
    else:
        weights.start(model)
    model.train()


def _look(stepper: Stepper, progress: Progress, run: Path, begun: str, repeated: int) -> Replayed:
    """Run the step up to its gradients."""
    stepper.leave_out(progress)
    stepper.show_model(stepper.loader)
    first = int(stepper.loader.state_dict()["sequences"])
    batches, counts = stepper.fetch(stepper.loader, stepper.micro_batches(progress.step))
    update = stepper.gradients(progress.step + 1, batches, counts)
    last = int(stepper.loader.state_dict()["sequences"])
    step = progress.step + 1
    line = next((one for one in records.read(run / "metrics.jsonl", strict=False) if one["step"] == step), {})
    named = stepper.model.named_parameters()
    gradients = {name: float(local(one.grad).float().norm()) for name, one in named if one.grad is not None}
    return Replayed(
        *(str(run), step, begun, repeated, (first, last), float(update.loss), float(update.grad_norm)),
        *(line.get("loss"), line.get("grad_norm"), gradients, _sequences(stepper, batches)),
    )


def _sequences(stepper: Stepper, batches: Sequence[Batch]) -> list[Row]:
    reader = _Reader(stepper.task)
    if stepper.job.hooks.gives("head") == "token_logits" and all(b.labels.shape == b.inputs.shape for b in batches):
        executor = hookspecs.executor(stepper.model, reader, stepper.job)
        stepper.model.train(False)
        for batch in batches:
            executor.evaluate(batch)
        stepper.model.free_gathered()
    rows: list[Row] = []
    for number, batch in enumerate(batches):
        losses = reader.losses[number] if reader.losses else [[]] * len(batch.inputs)
        found = zip(batch.inputs.tolist(), batch.labels.tolist(), losses, strict=True)
        rows += [Row(inputs, _flat(labels), own) for inputs, labels, own in found]
    return rows


def _flat(labels: Any) -> list[int]:
    return labels if isinstance(labels, list) else [labels]


class _Reader:
    """A task that records the loss at every position."""

    def __init__(self, task: Any) -> None:
        self._task = task
        self.losses: list[list[list[float | None]]] = []

    def weight(self, batch: Batch) -> int:
        return 0

    def loss(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        logits = self._task.outputs(part, hidden, batch).float()
        labels = batch.labels
        found = -logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        kept, read = (labels != MASKED).tolist(), found.tolist()
        self.losses.append(
            [
                [loss if seen else None for loss, seen in zip(row, mask, strict=True)]
                for row, mask in zip(read, kept, strict=True)
            ]
        )
        return torch.zeros((), device=hidden.device)

    def outputs(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        return hidden
