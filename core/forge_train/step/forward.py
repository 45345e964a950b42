"""The model at work without an optimizer: micro-batches, what they count, sums over them, and evaluations."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..base.errors import PluginError, during
from ..contract.batch import MASKED, Batch
from ..contract.events import Evaluation, Value, metric_key
from ..contract.model import Model
from ..contract.protocols import Executor, Loader, Task
from ..mesh.tensors import remember_host
from ..plugin import hookspecs
from ..plugin.job import Job
from .aggregate import Metrics, split


@dataclass(frozen=True)
class Counts:
    """Divisors of losses: sums over the micro-batches of all ranks."""

    weight: float
    """Sum of the task's own counts, such as unmasked labels: for the task's loss."""
    tokens: float
    """Positions that the model computes, whatever is masked: for attached losses, which are sums over them."""


class Forward:
    """Components of a forward pass, resolved once."""

    def __init__(self, job: Job, model: Model) -> None:
        self.job, self.model = job, model
        self.task: Task = hookspecs.task(job)
        self.executor: Executor = hookspecs.executor(model, self.task, job)
        self._prepare = job.hooks.prepare_batch()
        self._transfer = _Transfer(job.device)
        model.watch(job.step.passes)
        found = hookspecs.metrics(model, job)
        named = {metric_key(plugin, name): one for plugin, metrics in found for name, one in metrics.items()}
        self.metrics = Metrics(job, named)
        self.waited = 0.0
        """Seconds that were spent in loaders, so far."""

    @property
    def accumulation(self) -> int:
        """Micro-batches of each rank in a whole global batch."""
        train = self.job.config.train
        return self.job.dist.layout.micro_batches(train.global_batch, train.micro_batch)

    def micro_batches(self, step: int) -> int:
        """Micro-batches of each rank in the step that follows `step` others."""
        train = self.job.config.train
        return self.job.dist.layout.micro_batches(train.batch_at(step), train.micro_batch)

    def take_batches(self, loader: Loader, count: int, whose: str = "") -> list[Batch]:
        """A loader's next micro-batches, prepared, on the CPU."""
        first = int(loader.state_dict()["sequences"])
        try:
            batches = [self._next(loader) for _ in range(count)]
        except StopIteration as error:
            who = whose or self.job.hooks.whose("build_data")
            raise PluginError(f"{who}: the loader ended. A loader never ends.") from error
        return self._prepare(batches, first)

    def _next(self, loader: Loader) -> Batch:
        began = time.perf_counter()
        batch = next(loader)
        self.waited += time.perf_counter() - began
        return batch

    @during("data")
    def fetch(self, loader: Loader, count: int) -> tuple[list[Batch], Counts]:
        """Micro-batches on the device, and what all ranks' together count."""
        batches = self.take_batches(loader, count)
        counts = [sum(self.task.weight(batch) for batch in batches), sum(batch.inputs.numel() for batch in batches)]
        if self.job.dist.world > 1:  # on the CPU, so that nothing waits for the device
            mine = torch.tensor(counts, dtype=torch.float64)
            counts = self.job.dist.all_reduce(mine, axis="data").tolist()
        return self.on_device(batches), Counts(*map(float, counts))

    def on_device(self, batches: list[Batch]) -> list[Batch]:
        """A step begins."""
        self.job.step.batches = moved = self._transfer(batches)
        return moved

    def global_batches(self, count: int) -> Iterator[int]:
        """The sizes of an evaluation's steps, each a global batch."""
        for start in range(0, count, self.accumulation):
            yield min(self.accumulation, count - start)
            self.job.step.end()

    def evaluated(self, executor: Executor, batch: Batch) -> Tensor:
        """A batch's loss sum."""
        self.job.step.batch = batch
        return executor.evaluate(batch)

    def show_model(self, loader: Loader) -> None:
        """Let a loader that makes its batches with the model (`RolloutLoader`) see it as it is now."""
        if (on_model := getattr(loader, "on_model", None)) is None:
            return
        self.model.train(False)
        with torch.no_grad():
            on_model(self.model)
        self.model.free_gathered()
        self.model.train()

    def mean_loss(self, loader: Loader, count: int) -> tuple[float, int]:
        """The mean loss over some micro-batches of each rank, and the number of their unmasked labels."""
        self.show_model(loader)
        self.model.train(False)
        total, labels = (torch.zeros((), dtype=torch.float64, device=self.job.device) for _ in range(2))
        weight = 0.0
        for size in self.global_batches(count):
            batches, counts = self.fetch(loader, size)
            for batch in batches:
                total += self.evaluated(self.executor, batch)
                kept = batch.labels != MASKED
                labels += (kept.flatten(2).any(-1) if kept.dim() > 2 else kept).sum()
            weight += counts.weight
        self.model.free_gathered()
        self.model.train()
        loss = float(self.job.dist.all_reduce(total, axis="loss")) / (weight or 1.0)
        return loss, int(self.job.dist.all_reduce(labels, axis="data"))


def close(loader: Loader) -> None:
    """Have a loader end its threads and processes, if it says how: `close()`, which a loader need not have."""
    getattr(loader, "close", lambda: None)()


class _Transfer:
    """Copies batches to the device. On CUDA this happens on a stream of its own: the host prepares a step while the
    device is at work on the one before, so copies from pinned memory run beside that work and not after it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __call__(self, batches: Iterable[Batch]) -> list[Batch]:
        if self._stream is None:
            return self._moved(batches)
        with torch.cuda.stream(self._stream):
            moved = self._moved(batches)
        compute = torch.cuda.current_stream(self._device)
        compute.wait_stream(self._stream)
        for batch in moved:
            batch.map(partial(_record, compute))  # its memory belongs to the other stream, which does not see the step
        return moved

    def _moved(self, batches: Iterable[Batch]) -> list[Batch]:
        """Tensors that several batches share stay shared: what is the same in all of a step is known to be."""
        known: dict[int, Tensor] = {}

        def move(tensor: Tensor) -> Tensor:
            if id(tensor) not in known:
                if self._stream is not None and tensor.device.type == "cpu" and not tensor.is_pinned():
                    tensor = tensor.pin_memory()  # made since the loader; the copy would wait for the device
                known[id(tensor)] = tensor.to(self._device, non_blocking=True)
            return known[id(tensor)]

        made = []
        for batch in batches:
            made.append(batch.map(move))
            if batch.document_ids is not None and made[-1].document_ids is not None:
                remember_host(made[-1].document_ids, batch.document_ids)
        return made


def _record(stream: torch.cuda.Stream, tensor: Tensor) -> Tensor:
    tensor.record_stream(stream)
    return tensor


@dataclass(frozen=True)
class HeldOut:
    """Data that each evaluation reads from its start."""

    loader: Loader
    start: dict[str, Any]

    @classmethod
    def of(cls, loader: Loader) -> HeldOut:
        return cls(loader, loader.state_dict())

    def from_start(self) -> Loader:
        self.loader.load_state_dict(self.start)
        return self.loader


class Evaluations:
    """The loss on held-out data, the same every time; a subclass (`Setup.evaluations`) knows more.

    Args:
        forward: the model at work.
        held_out: the data, where each evaluation begins.
    """

    def __init__(self, forward: Forward, held_out: Loader) -> None:
        self._forward, self._held_out = forward, HeldOut.of(held_out)

    def run(self, step: int, batches: int | None = None) -> Evaluation:
        """Evaluate, and return the results; the caller notifies plugins.

        Args:
            step: the run's current step.
            batches: global batches of each evaluation that takes any; by default, as the configuration and its plugin
                say.
        """
        usual = self._forward.job.config.train.evaluate_batches
        with self._forward.metrics.apart():
            held_out = self._held_out.from_start()
            loss, tokens = self._forward.mean_loss(held_out, (batches or usual) * self._forward.accumulation)
            found = self._forward.metrics.take() | self.others(batches)
        return Evaluation(step, loss, tokens, *split(found))

    def others(self, batches: int | None) -> dict[str, Value]:
        """Run the other evaluations, and return their results by `name.metric`."""
        return {}

    def close(self) -> None:
        """No evaluation follows."""
        close(self._held_out.loader)
