"""One optimizer step: micro-batches in, updated weights and a `StepResult` out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..auxiliary import loss_scaling
from ..composition.model import Model
from ..errors import PluginError
from ..events import StepResult, Update
from ..job import Job
from ..protocols import Batch, Executor, Loader, LossScale, Schedule, Task
from ..registry.unused import note_unused
from .gradients import clip, full, present, scale, total_norm


@dataclass(frozen=True)
class Counts:
    """What losses are divided by: sums over the micro-batches of all ranks."""

    weight: float
    """What the task counts, such as unmasked labels: for the task's loss."""
    tokens: float
    """Positions that the model computes, whatever is masked: for attached losses, which are sums over them."""


@dataclass
class Progress:
    """How far the run is. The data's position is the loader's: a roll-back moves the two apart."""

    step: int = 0
    tokens: int = 0
    last_saved: int = -1


class Stepper:
    """Everything a step needs, resolved once."""

    def __init__(
        self, job: Job, model: Model, optimizer: torch.optim.Optimizer, schedule: Schedule, loader: Loader
    ) -> None:
        train = job.config.train
        self.job, self.model, self.optimizer, self.schedule, self.loader = job, model, optimizer, schedule, loader
        self.task: Task = job.hooks.task()
        self.executor: Executor = job.hooks.executor(model, self.task)
        self.loss_scale: LossScale | None = job.hooks.loss_scale()
        note_unused(job.hooks, job.config, "step")
        _check_parameters(job, model, optimizer)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.accumulation = train.global_batch // (train.micro_batch * job.dist.data_ranks)
        self._prepare = job.hooks.prepare_batch()
        self.tokenizer = tokenizer_digest(job)
        self._around_backward = job.hooks.span("forward_backward")
        self._around_optimizer = job.hooks.span("optimizer")

    def fetch(self, loader: Loader, count: int) -> tuple[list[Batch], Counts]:
        """Micro-batches on the device, and what all ranks' together count."""
        try:
            batches = [self._prepare(next(loader)) for _ in range(count)]
        except StopIteration as error:
            raise PluginError(
                f"{self.job.hooks.whose('build_data')}: the loader ended. A loader never ends."
            ) from error
        counts = [sum(self.task.weight(batch) for batch in batches), sum(batch.inputs.numel() for batch in batches)]
        if self.job.dist.world > 1:  # on the CPU, so that nothing waits for the device
            mine = torch.tensor(counts, dtype=torch.float64)
            counts = self.job.dist.all_reduce(mine, axis="data").tolist()
        return [batch.to(self.job.device) for batch in batches], Counts(*map(float, counts))

    def run(self, progress: Progress) -> StepResult:
        """Take one step from where the run is."""
        started = time.perf_counter()
        first = int(self.loader.state_dict()["position"])
        batches, counts = self.fetch(self.loader, self.accumulation)
        update = self._backward(progress.step + 1, batches, counts)
        self.job.hooks.on_gradients(update)
        lr = float(self.optimizer.param_groups[0]["lr"])
        if not update.vetoed:
            self._apply(update)
        self.optimizer.zero_grad(set_to_none=True)
        if self.loss_scale is not None:
            self.loss_scale.update(bool(update.vetoed))
        progress.step += 1
        progress.tokens += self.job.config.train.global_batch * self.job.config.train.sequence
        return StepResult(
            step=progress.step,
            tokens=progress.tokens,
            loss=update.loss,
            grad_norm=update.grad_norm,
            lr=lr,
            seconds=time.perf_counter() - started,
            skipped=bool(update.vetoed),
            data_range=(first, int(self.loader.state_dict()["position"])),
        )

    def evaluate(self, held_out: Loader, count: int) -> tuple[float, float]:
        """The mean loss over some micro-batches of each rank, and the weight of all of them."""
        self.model.train(False)
        total, weight = torch.zeros((), dtype=torch.float64, device=self.job.device), 0.0
        for _ in range(count):
            batches, counts = self.fetch(held_out, 1)
            total += self.executor.evaluate(batches[0])
            weight += counts.weight
        self.model.release()
        self.model.train()
        return float(self.job.dist.all_reduce(total, axis="loss")) / (weight or 1.0), weight

    def _backward(self, step: int, batches: Sequence[Batch], counts: Counts) -> Update:
        """Accumulate the gradients of the mean loss over the global batch."""
        factor: Tensor | float = self.loss_scale.scale() if self.loss_scale else 1.0
        # SHARD transforms average over R ranks, so R / count times the summed losses is the mean over all of them. The
        # backward pass gets the next power of two for R: a factor of 3 would round differently from one process.
        ranks = self.job.dist.layout.averaged
        power = 1 << (ranks - 1).bit_length()
        with self._around_backward(), loss_scaling(factor * (power / (counts.tokens or 1.0))):
            total = self.executor.train(batches, factor * (power / (counts.weight or 1.0)))
        self.model.after_backward()
        gradients = present(self.parameters)
        if self.loss_scale is not None or power != ranks:
            scale(gradients, ranks / power / factor)
        norm = total_norm(gradients, self.job.dist)
        return Update(step, self._mean(total, counts.weight), norm, self.parameters)

    def _mean(self, total: Tensor, weight: float) -> Tensor:
        """The mean over the global batch from this rank's sum."""
        total = self.job.dist.all_reduce(full(total).detach().float().clone(), axis="loss")
        return total / (weight or 1.0)

    def _apply(self, update: Update) -> None:
        limit = self.job.config.train.clip_norm
        if limit and (gradients := present(self.parameters)):
            clip(gradients, update.grad_norm, limit)
        with self._around_optimizer():
            self.optimizer.step()
        self.schedule.step()


def _check_parameters(job: Job, model: Model, optimizer: torch.optim.Optimizer) -> None:
    """Whether the optimizer updates exactly what is to be trained."""
    given = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained = {name: id(parameter) for name, parameter in model.named_parameters() if parameter.requires_grad}
    if lost := [name for name, number in trained.items() if number not in given]:
        few = f"{', '.join(lost[:3])}{', …' if len(lost) > 3 else ''}"
        raise PluginError(
            f"{job.hooks.whose('optimizer')}: {len(lost)} of {len(trained)} trainable parameters are in no group "
            f"({few}). Add them, or freeze them with requires_grad_(False)."
        )
    if given - {id(parameter) for parameter in model.parameters()}:
        raise PluginError(
            f"{job.hooks.whose('optimizer')}: it holds parameters that are not the model's. "
            "Take them from model.named_parameters()."
        )


def tokenizer_digest(job: Job) -> str | None:
    """What tells the run's tokenizer from others."""
    return job.hooks.tokenizer().digest if job.hooks.provider("tokenizer") else None
