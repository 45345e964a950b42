"""A model, data and everything else that a run needs, in one plugin: the next number of a progression is predicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from forge_train import Batch, Init, Job, Model, Plugin, hookimpl

NUMBERS = 32


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(NUMBERS, 16), nn.Linear(16, NUMBERS, bias=False)

    def initial(self, name: str) -> Init:
        return Init("normal", 0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(inputs))
        return logits


class Progressions:
    """Rows that count up by one, each from another number."""

    def __init__(self, job: Job) -> None:
        self.job, self.position = job, 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        rows, length = self.job.config.train.micro_batch, self.job.config.train.sequence
        first = self.position + self.job.dist.data_rank * rows
        self.position += rows * self.job.dist.data_ranks
        numbers = (torch.arange(first, first + rows)[:, None] + torch.arange(length + 1)) % NUMBERS
        return Batch(numbers[:, :-1], numbers[:, 1:])

    def state_dict(self) -> dict[str, Any]:
        return {"sequences": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["sequences"]

    def skip(self, sequences: int) -> None:
        self.position += sequences


class NextNumber:
    def weight(self, batch: Batch) -> int:
        return batch.labels.numel()

    def loss(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(hidden.flatten(0, 1), batch.labels.flatten(), reduction="sum")

    def outputs(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        return hidden


class OneByOne:
    """Runs one micro-batch after the other."""

    def __init__(self, model: Model, task: Any) -> None:
        self.model, self.task = model, task

    def train(self, batches: Sequence[Batch], scale: Tensor | float) -> Tensor:
        total = torch.zeros(())
        for number, batch in enumerate(batches, start=1):
            self.model.on_micro_batch(number == len(batches), batch=batch)
            loss = self.task.loss(self.model.parts[0], self.model(batch.inputs), batch)
            torch.autograd.backward(loss * scale)
            total += loss.detach()
        return total

    def evaluate(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            loss: Tensor = self.task.loss(self.model.parts[0], self.model(batch.inputs), batch)
        return loss


class Toy(Plugin):
    """Trains an embedding and a head."""

    api = (1, 0)

    @hookimpl
    def build_model(self, job: Job) -> Net:
        return Net()

    @hookimpl
    def build_data(self, job: Job, split: str) -> Progressions:
        return Progressions(job)

    @hookimpl
    def task(self, job: Job) -> NextNumber:
        return NextNumber()

    @hookimpl
    def executor(self, model: Model, task: Any, job: Job) -> OneByOne:
        return OneByOne(model, task)

    @hookimpl
    def optimizer(self, model: Model, job: Job) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.05)

    @hookimpl
    def lr_schedule(self, optimizer: torch.optim.Optimizer, job: Job) -> Any:
        return torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
