"""A plugin for every slot and chain, as somebody who has only read the protocols would write it.

Each counts in `uses` how often what it gave was really used: not the hook's call, but that of what it returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import toys
from forge_train import MASKED, Batch, Job, Model, Plugin, Task, hookimpl
from forge_train_kit import hookspecs
from forge_train_kit.heads import Classes

VOCABULARY = 256


class Outside(Plugin):
    """The base of the plugins here."""

    api = (1, 0)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.uses = 0

    def use(self) -> None:
        self.uses += 1


class OutsideData(Outside):
    """Counts up, from another number in every sequence."""

    @hookimpl
    def build_data(self, job: Job, split: Literal["train", "validation"]) -> Any:
        if job.hooks.provider("classes"):
            assert len(hookspecs.classes(job).names) == 2
        return OutsideLoader(job, self)


class OutsideLoader(toys.PlacedLoader):
    def __init__(self, job: Job, owner: Outside) -> None:
        super().__init__(job)
        self.owner = owner

    def batch(self, places: Tensor) -> Batch:
        self.owner.use()
        tokens = (places[:, None] * 7 + torch.arange(self.job.config.train.sequence + 1)) % VOCABULARY
        return Batch(tokens[:, :-1], tokens[:, 1:])


class OutsideClasses(Outside):
    """Two classes."""

    @hookimpl
    def classes(self, job: Job) -> Classes:
        self.use()
        return Classes(("even", "odd"), "text")


class OutsideTokenizer(Outside):
    """Latin-1."""

    @hookimpl
    def tokenizer(self, job: Job) -> Any:
        return Latin(self)


class Latin:
    begin: tuple[int, ...] = ()
    end = None
    stops: tuple[int, ...] = ()
    digest = "latin-1"

    def __init__(self, owner: Outside) -> None:
        self.owner = owner

    @property
    def vocabulary(self) -> int:
        self.owner.use()
        return VOCABULARY

    def encode(self, text: str) -> list[int]:
        return list(text.encode("latin-1", "replace"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("latin-1")


class OutsideTask(Outside):
    """Predicts the next token, and counts only half of the tokens' weight."""

    @hookimpl
    def task(self, job: Job) -> Any:
        owner, loss = self, hookspecs.loss(job)

        class Halved:
            def weight(self, batch: Batch) -> float:
                return 0.5 * int((batch.labels != MASKED).sum())

            def loss(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
                owner.use()
                return 0.5 * loss(hidden, part.get_submodule("head"), batch.labels)

            def outputs(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
                logits: Tensor = part.get_submodule("head")(hidden)
                return logits

        return Halved()


class OutsideLoss(Outside):
    """Cross-entropy, all at once."""

    @hookimpl
    def loss(self, job: Job) -> Any:
        def summed(hidden: Tensor, head: nn.Module, labels: Tensor) -> Tensor:
            self.use()
            logits = head(hidden).float().flatten(0, 1)
            return F.cross_entropy(logits, labels.flatten(), ignore_index=MASKED, reduction="sum")

        return summed


class OutsideExecutor(Outside):
    """All micro-batches' losses first, then one backward pass."""

    @hookimpl
    def executor(self, model: Model, task: Task, job: Job) -> Any:
        owner = self

        class Together:
            def train(self, batches: Sequence[Batch], scale: Tensor | float) -> Tensor:
                owner.use()
                losses = []
                for number, batch in enumerate(batches, start=1):
                    model.on_micro_batch(number == len(batches))
                    losses.append(self.loss(batch))
                total = torch.stack(losses).sum()
                torch.autograd.backward(total * scale)
                return total.detach()

            def evaluate(self, batch: Batch) -> Tensor:
                with torch.no_grad():
                    return self.loss(batch)

            def loss(self, batch: Batch) -> Tensor:
                return task.loss(model.parts[0], model(batch.inputs, **batch.model_inputs()), batch)

        return Together()


class OutsideOptimizer(Outside):
    """Plain gradient descent."""

    @hookimpl
    def optimizer(self, model: Model, job: Job) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_post_hook(lambda *_: self.use())
        return optimizer


class OutsideSchedule(Outside):
    """Halves the learning rate at every step."""

    @hookimpl
    def lr_schedule(self, optimizer: torch.optim.Optimizer, job: Job) -> Any:
        def halved(step: int) -> float:
            self.use()
            return 0.5**step

        return torch.optim.lr_scheduler.LambdaLR(optimizer, halved)


class OutsideScale(Outside):
    """A loss scale that doubles with every step that was not skipped."""

    @hookimpl
    def loss_scale(self, job: Job) -> Any:
        return Doubling(self)


class Doubling:
    def __init__(self, owner: Outside) -> None:
        self.owner, self.value = owner, 2.0

    def scale(self) -> float:
        self.owner.use()
        return self.value

    def update(self, skipped: bool) -> None:
        self.value *= 0.5 if skipped else 2.0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
