"""An outside loader whose batches are what the current model says next, and what its tests have the ranks do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

import cases
import toys
from forge_train import MASKED, Batch, Gt, Job, Model, Plugin, hookimpl, section
from forge_train.plugin import hookspecs
from forge_train_tools.testing import TinyRun, run_forge

PROMPT = 2


class Rollouts(Plugin):
    """Has the model continue prompts every few steps, and trains on what it said."""

    api = (1, 0)

    @section
    class Config:
        every: Annotated[int, Gt(0)] = 2
        """Steps for which a rollout gives the batches."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.loader: RolloutLoader | None = None

    @hookimpl
    def build_data(self, job: Job, split: Literal["train", "validation"]) -> RolloutLoader:
        loader = RolloutLoader(job, self.config.every, 0 if split == "train" else 10**6)
        if split == "train":
            self.loader = loader
        return loader

    def state_dict(self) -> dict[str, Any]:
        return {"said": self.loader.said}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.said = state["said"]


class RolloutLoader(toys.PlacedLoader):
    """Rows of a rollout, in the order of the global stream."""

    def __init__(self, job: Job, every: int, offset: int) -> None:
        super().__init__(job)
        train, self.offset = job.config.train, offset
        self.size, self.length = every * train.global_batch, train.sequence + 1
        self.said = torch.zeros(self.size, self.length, dtype=torch.int64)
        """Rows of all data ranks, the same on every rank."""
        self.modes: list[bool] = []

    def on_model(self, model: Model) -> None:
        self.modes += [part.training or torch.is_grad_enabled() for part in model.parts]
        if self.position % self.size:
            return
        mine = [self.position + place for place in range(self.size) if self._owner(place) == self.job.dist.data_rank]
        rows = torch.stack([_prompt(index + self.offset) for index in mine])
        task = hookspecs.task(self.job)
        while rows.shape[1] < self.length:
            hidden = model(rows)
            logits = task.outputs(model.parts[-1], hidden, Batch(rows, rows))
            rows = torch.cat([rows, cases.whole(logits)[:, -1:].argmax(-1)], 1)
        gathered = zip(
            self.job.dist.gather_tensors(torch.tensor(mine)), self.job.dist.gather_tensors(rows), strict=True
        )
        for places, said in gathered:
            self.said[places % self.size] = said

    def _owner(self, place: int) -> int:
        return place // self.job.config.train.micro_batch % self.job.dist.data_ranks

    def batch(self, places: Tensor) -> Batch:
        tokens = self.said[places % self.size]
        labels = tokens[:, 1:].clone()
        labels[:, : PROMPT - 1] = MASKED
        return Batch(tokens[:, :-1], labels)


def _prompt(index: int) -> Tensor:
    return torch.randint(0, toys.VOCABULARY, (PROMPT,), generator=torch.Generator().manual_seed(index))


def rolled(
    folder: str, plugins: Sequence[str] = (), config: Mapping[str, Any] | None = None, steps: int = 6, **more: Any
) -> dict[str, Any]:
    """Train a tower on what it says, and say what that was."""
    values = {**toys.SMALL, "train.micro_batch": 1, "train.evaluate_every": 3, "adamw.lr": 0.1, **(config or {})}
    wanted = ["toys:ToyModel", "rollout_cases:Rollouts", "cases:Probe", *plugins]
    run: TinyRun = run_forge(wanted, values, steps=steps, preset="", folder=Path(folder), **more)
    return {
        "losses": run.losses,
        "norms": [line["grad_norm"] for line in run.metrics],
        "batches": run.plugin("probe").batches,
        "evaluations": [event["loss"] for event in run.events if event["event"] == "evaluation"],
        "modes": run.plugin("rollouts").loader.modes,
        "weights": {name: cases.digest(cases.whole(p)) for name, p in run.model.named_parameters()},
    }
