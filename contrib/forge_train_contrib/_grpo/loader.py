"""The loader of answers: rows of a rollout, in the order of the global stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from forge_train import MASKED, Batch, Job, Model
from forge_train.contract.batch import TOKENS, Axes
from forge_train_kit.data.held_out import Side

from .rollouts import Rollout, Rollouts

ADVANTAGE, STALE, DRAWN, DRAWABLE = "grpo.advantage", "grpo.stale", "grpo.drawn", "grpo.drawable"
"""Targets: the advantage of each answer, `[batch]` fp64; whether the model has learned since it was drawn, `[batch]`
bool; the log-probability of each label when it was drawn, `[batch, sequence]` fp32; and, where a distribution was
truncated, the ids that could be drawn for labels: `[ids, 2]` int64, the label's place in the flattened batch and an
id."""
INPUTS, PLACES, FIRST, LENGTH = "grpo.inputs", "grpo.places", "grpo.first", "grpo.length"
"""Targets that know whole rows where a rank has slices of them: the inputs, `[batch, sequence of a whole row]`; the
number of each label in the flattened batch, `[batch, sequence]` int64; whether it is the first of its answer, likewise
bool; and the number of labels of each answer, `[batch]` int64."""


class AnswerLoader:
    """This rank's micro-batches of answers.

    Args:
        job: the run.
        rollouts: makes them.
        side: of the prompts.
    """

    def __init__(self, job: Job, rollouts: Rollouts, side: Side) -> None:
        train, self._dist = job.config.train, job.dist
        self._rollouts, self._side, self._micro_batch = rollouts, side, train.micro_batch
        rollouts.expect(side)
        self._step = train.global_batch
        steps = 1 + rollouts.stale if side == "train" else train.evaluate_batches
        self._size = steps * train.global_batch
        self._position = 0
        self.rollout = Rollout.empty(self._size, train.sequence + 1)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def on_model(self, model: Model) -> None:
        """Make a rollout if the last one is used up; an evaluation makes its own."""
        if self._side == "validation":
            self.rollout = self._rollouts.make(model, "validation", 0, self._size)
        elif self.rollout.number != (number := self._position // self._size):
            self.rollout = self._rollouts.make(model, "train", number, self._size)

    def __next__(self) -> Batch:
        first = self._position + self._dist.data_rank * self._micro_batch
        self._position += self._micro_batch * self._dist.data_ranks
        return self._batch(torch.arange(first, first + self._micro_batch) % self._size)

    def _batch(self, rows: Tensor) -> Batch:
        found = self.rollout
        tokens, place = found.tokens[rows], torch.arange(1, found.tokens.shape[1])
        learned = (place >= found.first[rows, None]) & (place < found.stop[rows, None])
        labels = tokens[:, 1:].where(learned, MASKED)
        stale = (rows >= self._step) & (self._side == "train")
        made = with_rows(Batch(tokens[:, :-1].clone(), labels))
        made = made.with_targets({ADVANTAGE: found.advantage[rows], STALE: stale})
        made = made.with_targets({DRAWN: found.drawn[rows, 1:]}, axes=TOKENS)
        if not len(found.drawable):
            return made
        return made.with_targets({DRAWABLE: self._drawable(rows)}, axes=Axes(batch=None))

    def _drawable(self, rows: Tensor) -> Tensor:
        found, length = self.rollout, self.rollout.tokens.shape[1]
        places = torch.repeat_interleave(found.choices.flatten())
        here = torch.full((self._size,), -1)
        here[rows] = torch.arange(len(rows))
        row, place = here[places // length], places % length - 1
        return torch.stack([row * (length - 1) + place, found.drawable.long()], 1)[row >= 0]

    def state_dict(self) -> dict[str, Any]:
        return {"sequences": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position = int(state["sequences"])

    def load_rollout(self, state: dict[str, Any]) -> None:
        """Continue a saved rollout; one of another size, which a changed configuration may bring, is made again."""
        if state["tokens"].shape == self.rollout.tokens.shape:
            self.rollout = Rollout(**state)

    def skip(self, sequences: int) -> None:
        self._position += sequences


def with_rows(batch: Batch) -> Batch:
    """The batch with targets of its whole rows."""
    learned = batch.labels != MASKED
    places = torch.arange(learned.numel()).view(learned.shape)
    first = learned & (learned.cumsum(1) == 1)
    return batch.with_targets({INPUTS: batch.inputs, LENGTH: learned.sum(1)}).with_targets(
        {PLACES: places, FIRST: first}, axes=TOKENS
    )
