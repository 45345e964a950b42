"""One optimizer step: micro-batches in, updated weights and a `StepResult` out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.errors import during
from ..contract.auxiliary import loss_scaling
from ..contract.batch import Batch, MicroBatch
from ..contract.events import StepResult, Update
from ..contract.model import Model
from ..contract.protocols import Loader, LossScale, Schedule
from ..mesh.distributed import DistributedContext
from ..mesh.tensors import full_tensor, gradients_of, local, scale
from ..plugin import hookspecs
from ..plugin.job import Job
from ..store.placement import reduce_partial
from .forward import Counts, Forward


@dataclass
class Progress:
    """Progress of the run. The loader has the data's position: a roll-back separates the two."""

    step: int = 0
    tokens: int = 0
    last_saved: int = -1
    left_out: list[tuple[int, int]] = field(default_factory=list)
    """Global sequences, from and up to, that are left out once the loader comes to them."""


class Watcher:
    """Looks at a run from inside; every method may be overridden. Plugins are not told that there is one."""

    def data(self, job: Job, split: Literal["train", "validation"]) -> Loader:
        """The loader of a split."""
        return job.hooks.build_data(split)

    def on_assembled(self, stepper: Stepper) -> None:
        """The run is put together; nothing was started or loaded."""

    def on_micro_batch(self, micro: MicroBatch) -> None:
        """A micro-batch begins."""

    def on_backward(self, update: Update) -> Update:
        """All gradients are there, and their norm; plugins are told next. The step continues with what this returns."""
        return update

    def on_update(self, update: Update) -> None:
        """Gradients are about to be clipped and to become an update; no plugin has vetoed it."""


class Stepper(Forward):
    """Everything a step needs, resolved once."""

    def __init__(
        self,
        job: Job,
        model: Model,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        loader: Loader,
        watcher: Watcher,
    ) -> None:
        super().__init__(job, model)
        self.optimizer, self.schedule, self.loader = optimizer, schedule, loader
        self.held_out: Loader | None = None
        """Loader of the held-out data, at its start."""
        self._watcher = watcher
        model.watch(watcher.on_micro_batch)
        self.loss_scale: LossScale | None = hookspecs.loss_scale(job) if job.hooks.provider("loss_scale") else None
        job.hooks.at_stage(job.hooks, job.config, "assembly")
        job.hooks.inspection.check_optimizer(job, model, optimizer)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.kept = {slot: keeper.digest(job) for slot, keeper in job.hooks.keepers.items()}
        """Digest of what the provider of a slot reads."""
        self.around_evaluate = hookspecs.around("evaluate", job)
        self._around_backward = hookspecs.around("forward_backward", job)
        self._around_optimizer = hookspecs.around("optimizer", job)

    @during("step")
    def run(self, progress: Progress) -> StepResult:
        """Take one step from where the run is."""
        started = time.perf_counter()
        self.leave_out(progress)
        self.show_model(self.loader)
        first = int(self.loader.state_dict()["sequences"])
        batches, counts = self.fetch(self.loader, self.micro_batches(progress.step))
        update = self._watcher.on_backward(self.gradients(progress.step + 1, batches, counts))
        lr = self.finish(update)
        train = self.job.config.train
        progress.tokens += train.batch_at(progress.step) * train.sequence
        progress.step += 1
        return StepResult(
            step=progress.step,
            tokens=progress.tokens,
            loss=update.loss,
            grad_norm=update.grad_norm,
            lr=lr,
            seconds=time.perf_counter() - started,
            skipped=bool(update.vetoed),
            data_range=(first, int(self.loader.state_dict()["sequences"])),
        )

    def tell(self, result: StepResult) -> None:
        """Tell the plugins of a step, which then ends."""
        self.job.hooks.on_step(result)
        self.job.step.end()

    def leave_out(self, progress: Progress) -> None:
        """Move the loader past data that a roll-back left out."""
        for first, last in sorted(progress.left_out):
            at = int(self.loader.state_dict()["sequences"])
            if first <= at < last:
                self.loader.skip(last - at)
        if progress.left_out:
            at = int(self.loader.state_dict()["sequences"])
            progress.left_out = [(first, last) for first, last in progress.left_out if last > at]

    def finish(self, update: Update) -> float:
        """Show a step's gradients to the plugins, and update the weights; the learning rate of that."""
        self.job.hooks.on_gradients(update)
        lr = float(self.optimizer.param_groups[0]["lr"])
        if not update.vetoed:
            self._watcher.on_update(update)
            self.apply(update)
        self.optimizer.zero_grad(set_to_none=True)
        if self.loss_scale is not None:
            self.loss_scale.update(bool(update.vetoed))
        return lr

    @during("forward")
    def gradients(self, step: int, batches: Sequence[Batch], counts: Counts) -> Update:
        """Accumulate the gradients of the mean loss over the global batch."""
        factor: Tensor | float = self.loss_scale.scale() if self.loss_scale else 1.0
        # SHARD transforms average over R ranks, so R / count times the summed losses is the mean over all of them. The
        # backward pass gets the next power of two for R: a factor of 3 would round differently from one process. Under
        # a loss scale it gets none, or gradients would overflow at another scale than those of one process.
        ranks = self.job.dist.layout.grad_average_size
        power = 1 << (ranks - 1).bit_length() if self.loss_scale is None else 1
        with self._around_backward(), loss_scaling(factor * (power / counts.tokens)):
            total = self.executor.train(batches, factor * (power / (counts.weight or 1.0)))
        self.job.step.batch = None
        self.model.after_backward()
        gradients = gradients_of(self.parameters)
        if self.loss_scale is not None or power != ranks:
            scale(gradients, ranks / power / factor)
        norms: list[tuple[list[int], Tensor]] = []
        norm = total_norm(gradients, self.job.dist, norms)
        return Update(step, self._mean(total, counts.weight), norm, self.parameters, norms=norms)

    def _mean(self, total: Tensor, weight: float) -> Tensor:
        """The mean over the global batch from this rank's sum."""
        total = self.job.dist.all_reduce(full_tensor(total).detach().float().clone(), axis="loss")
        return total / (weight or 1.0)

    @during("optimizer")
    def apply(self, update: Update) -> None:
        """Clip the gradients, and take the optimizer's step."""
        limit = self.job.config.train.clip_norm
        if limit and (gradients := gradients_of(self.parameters)):
            clip(gradients, update.grad_norm, limit)
        with self._around_optimizer():
            self.optimizer.step()
        if self.job.dist.world > 1:
            reduce_partial(self.optimizer)
        self.schedule.step()


def total_norm(
    gradients: Sequence[Tensor], context: DistributedContext, norms: list[tuple[list[int], Tensor]] | None = None
) -> Tensor:
    """The 2-norm of all gradients together, 0-dim float32 and bit-equal on all ranks, without waiting for the device.

    Each rank sums the squares of what it holds; the sums are added up over the mesh axes that the gradients are split
    along, those of one mesh together, and over the stages of a pipeline. torch's own total norm (2.13) fails for plain
    tensors beside DTensors, and for two meshes.

    Args:
        gradients: of any placement.
        context: of the processes.
        norms: is given the norms of what this rank holds, as `Update.norms`.
    """
    from torch.distributed.tensor import DTensor, Partial

    groups: dict[tuple[object, tuple[int, ...]], list[tuple[int, Tensor]]] = {}
    for place, gradient in enumerate(gradients):
        if not isinstance(gradient, DTensor):
            groups.setdefault((None, ()), []).append((place, gradient))
            continue
        if any(isinstance(placement, Partial) for placement in gradient.placements):
            groups.setdefault((None, ()), []).append((place, full_tensor(gradient)))
            continue
        split = tuple(
            axis
            for axis, placement in enumerate(gradient.placements)
            if not placement.is_replicate() and gradient.device_mesh.size(axis) > 1
        )
        groups.setdefault((gradient.device_mesh if split else None, split), []).append((place, local(gradient)))
    total = torch.zeros((), device=context.device)
    for (mesh, split), tensors in groups.items():
        held = _norms([tensor for _, tensor in tensors])
        if norms is not None:
            norms.append(([place for place, _ in tensors], held))
        square = torch.linalg.vector_norm(held).to(context.device, torch.float32) ** 2
        for axis in split:
            dist.all_reduce(square, group=mesh.get_group(axis))  # type: ignore[attr-defined]
        total += square
    for name in context.layout.dividing("layers"):
        context.all_reduce(total, axis=name)
    return total.sqrt()


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """The 2-norm of each tensor, on the device of the first; summed in fp32 where it is narrower."""
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(tensors):
        kinds.setdefault((tensor.device, tensor.dtype), []).append(place)
    norms: dict[int, Tensor] = {}
    for (_, dtype), places in kinds.items():
        wide = torch.float32 if dtype.itemsize < 4 else None
        norms |= zip(places, torch._foreach_norm([tensors[place] for place in places], 2.0, dtype=wide), strict=True)
    return torch.stack([norms[place].to(tensors[0].device) for place in range(len(tensors))])


def clip(gradients: Sequence[Tensor], norm: Tensor, limit: float) -> None:
    """Scale gradients in place so that their norm is at most `limit`."""
    scale(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))
