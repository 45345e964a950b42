"""The executor of the `sequential` plugin."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forge_train import Batch, ConfigError, Job, Model, Task
from forge_train_kit.activations import Interventions
from forge_train_kit.model import full_tensor


class SequentialExecutor:
    """One part, one micro-batch at a time; gradients accumulate in the parameters.

    Raises:
        ConfigError: for a model that was cut into several parts.
    """

    def __init__(self, model: Model, task: Task, job: Job) -> None:
        if len(model.parts) != 1:
            raise ConfigError("The sequential executor runs a whole model; enable a pipeline plugin with its executor.")
        self.model = model
        self.part = model.parts[0]
        self.task = task
        self._interventions = Interventions.of(model, job)

    def train(self, batches: Sequence[Batch], scale: Tensor | float) -> Tensor:
        """See `forge_train.Executor`; the host waits for nothing."""
        losses = []
        for index, batch in enumerate(batches, start=1):
            self.model.on_micro_batch(index == len(batches), batch=batch)
            loss = self._loss(batch)
            torch.autograd.backward(loss * scale)
            losses.append(full_tensor(loss.detach()))
        return torch.stack(losses).sum()

    def evaluate(self, batch: Batch) -> Tensor:
        """See `forge_train.Executor`."""
        was_training = self.part.training
        self.part.eval()
        try:
            with torch.no_grad(), self._interventions.applied():
                return full_tensor(self._loss(batch))
        finally:
            self.part.train(was_training)

    def _loss(self, batch: Batch) -> Tensor:
        hidden = self.part(batch.inputs, **batch.model_inputs())
        return self.task.loss(self.part, hidden, batch)
