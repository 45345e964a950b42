"""Gradients that go wrong on one rank at the batch of one step, whatever step it is met at."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch

from forge_train import (
    Batch,
    BatchPhase,
    DivergedError,
    Ge,
    Job,
    Model,
    Plugin,
    PrepareBatch,
    Update,
    hookimpl,
    section,
)
from forge_train.contract.protocols import Span, SpanName
from forge_train.mesh.tensors import local
from forge_train_tools.testing import run_forge
from forge_train_tools.testing.runs import TinyRun


class Poison(Plugin):
    """After the backward pass over the batch that the run first met at step `at`, sets an element of a gradient on one
    rank to NaN, or multiplies it. Notes what each step was trained on."""

    api = (1, 0)

    @section
    class Config:
        at: Annotated[int, Ge(0)] = 0
        rank: Annotated[int, Ge(0)] = 0
        parameter: str = ""
        """The first parameter of the rank with this in its name."""
        factor: float = 0.0
        """What the element is multiplied by; 0 for NaN."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.steps: list[tuple[int, tuple[int, int], bool]] = []
        """Step, its sequences, and whether it was skipped."""
        self._marked, self._batch, self._count = "", hashlib.sha256(), 0

    @hookimpl
    def on_start(self, job: Job, model: Model) -> None:
        self._job, self._model = job, model

    @hookimpl
    def prepare_batch(self, job: Job) -> PrepareBatch:
        def look(batch: Batch) -> Batch:
            self._batch.update(batch.inputs.numpy().tobytes())
            return batch

        return PrepareBatch(BatchPhase.MAKE, look)

    @hookimpl
    def around(self, span: SpanName) -> Span | None:
        return {"step": self._step, "forward_backward": self._backward}.get(span)

    @contextmanager
    def _step(self) -> Iterator[None]:
        self._batch = hashlib.sha256()
        self._count += 1
        yield

    @contextmanager
    def _backward(self) -> Iterator[None]:
        yield
        if self._count == self.config.at:
            self._marked = self._batch.hexdigest()
        if self._batch.hexdigest() != self._marked or self._job.dist.rank != self.config.rank:
            return
        gradients = [local(p.grad) for name, p in self._model.named_parameters() if self.config.parameter in name]
        with torch.no_grad():
            next(one for one in gradients if one.numel()).view(-1)[:1].mul_(self.config.factor or math.nan)

    @hookimpl
    def on_step(self, step: Any) -> None:
        self.steps.append((step.step, step.data_range, step.skipped))


class Alone(Plugin):
    """Makes the norm of step 5 NaN on rank 1 alone, the first time. Its name comes before that of the plugin that looks
    at it."""

    api = (1, 0)

    @hookimpl
    def on_start(self, job: Job) -> None:
        self._job, self._done = job, False

    @hookimpl
    def on_gradients(self, update: Update) -> None:
        if update.step == 5 and self._job.dist.rank == 1 and not self._done:
            self._done = True
            update.grad_norm = update.grad_norm * math.nan


def train(folder: str, plugins: list[str], config: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What became of a run: how it ended, what its steps were trained on, what it recorded."""
    try:
        run: TinyRun = run_forge(["anomaly", Poison, *plugins], config, folder=Path(folder), name="run", **more)
    except DivergedError as error:
        return {"diverged": str(error)}
    poison: Poison = run.plugin("poison")
    return {
        "steps": poison.steps,
        "losses": run.losses,
        "logged": [line["step"] for line in run.metrics],
        "anomalies": [[one["step"], one["kind"], one["reason"]] for one in run.events if one["event"] == "anomaly"],
        "state": run.plugin("anomaly").state_dict(),
    }
