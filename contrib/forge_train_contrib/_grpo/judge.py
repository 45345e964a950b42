"""Rewards by a model: a number for each answer after its prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from forge_train import Job
from forge_train.base.errors import ForgeError
from forge_train_kit import hookspecs
from forge_train_kit.model import full_tensor, whole_rows

from .prompts import Prompt, Prompts

KEY, JUDGE = "grpo.reward_model", "reward_model"
UNIT = 64
"""The length of rows is a multiple of this, which parallel layouts can divide, or the longest that the model reads."""


class Judge:
    """The run's reward model, which gives what `forge infer` gives for the same tokens.

    Args:
        job: the run; its extra model is composed by the time of the first answer.
        prompts: write each prompt with its answer.
        size: answers that are read side by side on each data-parallel rank.
    """

    def __init__(self, job: Job, prompts: Prompts, size: int) -> None:
        self._job, self._prompts, self._size = job, prompts, size

    def __call__(self, prompts: Sequence[Prompt], answers: Sequence[str]) -> list[float]:
        """The reward of each answer; every rank calls this, and gets the same.

        Raises:
            ForgeError: it is no number.
        """
        dist, longest = self._job.dist, longest_of(self._job)
        rows = [self._prompts.with_answer(*one)[-longest:] for one in zip(prompts, answers, strict=True)]
        each = self._size * dist.data_ranks
        found: dict[int, float] = {}
        for start in range(0, len(rows), each):
            first = start + dist.data_rank * self._size
            mine = rows[first : first + self._size]
            values = self._rewards(mine or rows[:1], longest)  # a rank without work keeps step
            found |= dict(zip(range(first, first + len(mine)), values, strict=False))
        self._job.models[JUDGE].free_gathered()
        found = {at: value for one in dist.gather_objects(found) for at, value in one.items()}
        for at, prompt in enumerate(prompts):
            if not math.isfinite(found[at]):
                raise ForgeError(
                    f"{KEY}: gave {found[at]} for the prompt at {prompt.where}; a reward is a finite number."
                )
        return [found[at] for at in range(len(rows))]

    @torch.no_grad()
    def _rewards(self, rows: Sequence[list[int]], longest: int) -> list[float]:
        sizes = torch.tensor([len(row) for row in rows])
        length = min(-(-int(sizes.max()) // UNIT) * UNIT, longest)
        inputs = torch.full((len(rows), length), hookspecs.tokenizer(self._job).end or 0)
        for at, row in enumerate(rows):
            inputs[at, : len(row)] = torch.tensor(row)
        places = torch.arange(length).expand(inputs.shape)
        padding = places >= sizes[:, None]  # a document of its own, which a model that looks ahead must not see
        numbers = torch.where(padding, places - sizes[:, None], places)
        model, device = self._job.models[JUDGE], self._job.device
        with whole_rows():
            hidden = model(inputs.to(device), document_ids=padding.long().to(device), position_ids=numbers.to(device))
        rewards = full_tensor(model.parts[-1].get_submodule("head")(hidden)).float().cpu()
        return [float(one) for one in rewards[torch.arange(len(rows)), sizes - 1, 0]]


def longest_of(job: Job) -> int:
    """Tokens that the reward model reads at once."""
    return min((int(getattr(part, "max_sequence", 1 << 31)) for part in job.models[JUDGE].parts), default=1 << 31)
