"""A training loop as one writes it by hand, to compare the engine's with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forge_train.plugin import hookspecs

if TYPE_CHECKING:
    import torch

    from forge_train.contract.model import Model
    from forge_train.contract.protocols import Loader
    from forge_train.plugin.job import Job


class ByHand:
    """The loop one writes without forge: the same module, loss, optimizer and batches."""

    def __init__(self, job: Job, model: Model, optimizer: torch.optim.Optimizer, loader: Loader) -> None:
        train = job.config.train
        self.model, self.part, self.device = model, model.parts[0], job.device
        self.optimizer, self.loader = optimizer, loader
        self.task, self.clip_norm, self.prepare = hookspecs.task(job), train.clip_norm, job.hooks.prepare_batch()
        self.accumulation = job.dist.layout.micro_batches(train.global_batch, train.micro_batch)
        self.tokens = self.of_items = 0

    def step(self) -> None:
        import torch

        from forge_train_kit.modalities import flops_of_items

        first = int(self.loader.state_dict()["sequences"])
        batches = self.prepare([next(self.loader) for _ in range(self.accumulation)], first)
        self.tokens += sum(batch.inputs.numel() for batch in batches)
        self.of_items += sum(flops_of_items(self.part, batch.extras) for batch in batches)
        weight = sum(self.task.weight(batch) for batch in batches)
        for left, batch in zip(reversed(range(len(batches))), batches, strict=True):
            batch = batch.to(self.device)
            self.model.on_micro_batch(not left, batch=batch)
            hidden = self.part(batch.inputs, **batch.model_inputs())
            loss: Any = self.task.loss(self.part, hidden, batch) / weight
            loss.backward()
        self.model.after_backward()
        if self.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.part.parameters(), self.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
