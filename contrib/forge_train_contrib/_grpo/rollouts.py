"""Rollouts: the current model answers prompts, and its answers are rewarded."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge_train import Job, Model
from forge_train.base.files import write_whole
from forge_train_kit import hookspecs
from forge_train_kit.data.chats import save_template
from forge_train_kit.data.held_out import Side
from forge_train_tools.generation.engine import run

from .gym import Gym
from .judge import Judge
from .prompts import Prompt, Prompts, shown
from .rewards import Reward
from .rule import Answer, Rule

METRICS = ("reward", "reward_std", "no_signal", "answer_tokens", "truncated")
EPSILON = 1e-4
"""Added to a group's standard deviation, as in TRL."""
SAMPLES = "samples.jsonl"
HELD_OUT = 1 << 62
"""First number of the answers to held-out prompts: they are never those of training."""


@dataclass
class Group:
    """The answers to a prompt."""

    prompt: Prompt
    answers: list[Answer]
    rewards: Tensor
    """`[answers]` fp64."""

    @property
    def signal(self) -> bool:
        return bool((self.rewards != self.rewards[0]).any())


@dataclass
class Rollout:
    """Answers that steps learn, one a row, the same on every rank."""

    number: int
    """Its number in the run; -1 before the first."""
    tokens: Tensor
    """`[rows, sequence + 1]` int64."""
    first: Tensor
    """Place of the first token of each answer, `[rows]` int64."""
    stop: Tensor
    """The end of each answer, exclusive; equal to `first` in rows that do not count."""
    advantage: Tensor
    """`[rows]` fp64."""
    drawn: Tensor
    """Log-probability of the token at each place when it was drawn, `[rows, sequence + 1]` fp32."""
    choices: Tensor
    """Number of ids that the token at each place was drawn from, `[rows, sequence + 1]` int64; 0 for all."""
    drawable: Tensor
    """These ids, place by place, `[sum of choices]` int32."""

    @classmethod
    def empty(cls, rows: int, length: int) -> Rollout:
        row = torch.zeros(rows, dtype=torch.int64)
        tokens = torch.zeros(rows, length, dtype=torch.int64)
        none = torch.zeros(0, dtype=torch.int32)
        return cls(-1, tokens, row, row.clone(), row.double(), torch.zeros(rows, length), tokens.clone(), none)

    def state_dict(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def advantages(rewards: Tensor, *, scaled: bool) -> Tensor:
    """Of each answer in its group, `[groups, answers]` fp64.

    Args:
        rewards: the same.
        scaled: whether to divide by the standard deviation of the group (of a sample: by n − 1).
    """
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred / (rewards.std(1, keepdim=True) + EPSILON) if scaled else centred


def penalty(length: int, most: int, buffer: int) -> float:
    """Deduction for a long answer (arXiv:2503.14476, eq. 13): up to 1, evenly over the last `buffer` tokens."""
    return max(0, length - (most - buffer)) / buffer if buffer else 0.0


class Rollouts:
    """Makes rollouts.

    Args:
        job: the run.
        config: of the plugin.
        author: the plugin, for the record of samples.
        observed: gives its metrics.
    """

    def __init__(self, job: Job, config: Any, author: object, observed: Callable[[], Mapping[str, Any] | None]) -> None:
        self._job, self._config, self._author, self._observed = job, config, author, observed
        self._tokenizer = hookspecs.tokenizer(job)
        gym = Gym(config.gym, config.gym_options, job.seed) if config.gym else None
        self._reward, self._prompts = gym or Reward(config.reward), Prompts(job, config, gym)
        self._judge = Judge(job, self._prompts, config.batch) if config.reward_model else None
        self._kept = False
        """True once samples were kept."""
        self._rule = Rule.of(config, self._tokenizer.vocabulary)

    @property
    def stale(self) -> int:
        """Steps that an answer may be old."""
        return int(self._config.stale)

    def expect(self, side: Side) -> None:
        """Check that there are prompts.

        Raises:
            ConfigError: there is none.
        """
        self._prompts.some(side, 0, 1)

    def make(self, model: Model, side: Side, number: int, rows: int) -> Rollout:
        """Have the model answer, and reward it. Every rank calls this, and gets the same.

        Args:
            model: in evaluation mode.
            side: of the prompts.
            number: of the rollout, which decides its prompts and its draws.
            rows: answers, in whole groups.
        """
        wanted = rows // self._config.group
        rounds = self._config.rounds if side == "train" else 1
        kept: list[Group] = []
        idle: list[Group] = []
        for turn in range(rounds):
            for group in self._groups(model, side, (number * rounds + turn) * wanted, wanted - len(kept)):
                (kept if group.signal or rounds == 1 else idle).append(group)
            if len(kept) == wanted:
                break
        groups = kept + idle[: wanted - len(kept)]
        self._observe([*kept, *idle])
        if side == "train":
            self._keep_samples(groups, number)
        return self._rows(groups, len(kept), number)

    def _groups(self, model: Model, side: Side, first: int, count: int) -> list[Group]:
        """Groups of the prompts of that number and of those after it."""
        size, prompts = self._config.group, self._prompts.some(side, first, count)
        offset = first * size + (HELD_OUT if side == "validation" else 0)
        made = partial(Answer, most=self._config.tokens, rule=self._rule, ends=self._prompts.ends, seed=self._job.seed)
        answers = [made(offset + at * size + nth, one.ids) for at, one in enumerate(prompts) for nth in range(size)]
        deque(run(self._job, model, iter(answers), slots=self._config.batch), maxlen=0)  # they end in any order
        each = [prompt for prompt in prompts for _ in range(size)]
        judged = self._judge(each, [self._text(one) for one in answers]) if self._judge else None
        rewards = self._job.dist.on_main(lambda: self._rewarded(each, answers, judged))
        return [Group(prompt, answers[at * size : (at + 1) * size], rewards[at]) for at, prompt in enumerate(prompts)]

    def _rewarded(self, each: Sequence[Prompt], answers: Sequence[Answer], judged: Sequence[float] | None) -> Tensor:
        """`[prompts, group]` fp64.

        Args:
            each: the prompt of each answer.
            answers: to them.
            judged: rewards by the reward model, if there is one.
        """
        most, buffer = self._config.tokens, self._config.overlong
        total = -torch.tensor([penalty(len(one.drawn), most, buffer) for one in answers], dtype=torch.float64)
        weight = 1.0 if judged is None else self._config.reward_weight
        if judged is not None:
            total += torch.tensor(judged, dtype=torch.float64)
        if weight:
            texts, written = [one.text for one in each], [self._text(one) for one in answers]
            found = self._reward(texts, written, [one.record for one in each], [one.where for one in each])
            total += weight * torch.tensor(found, dtype=torch.float64)
        return total.view(-1, self._config.group)

    def _text(self, answer: Answer) -> str:
        ids = answer.answer
        return self._tokenizer.decode(ids[:-1] if answer.ended else ids)

    def _rows(self, groups: Sequence[Group], kept: int, number: int) -> Rollout:
        size, length = self._config.group, self._job.config.train.sequence + 1
        found = Rollout.empty(len(groups) * size, length)
        found.number = number
        rewards = torch.stack([group.rewards for group in groups])
        found.advantage = advantages(rewards, scaled=self._config.variant != "dr_grpo").flatten()
        answers = [*chain.from_iterable(group.answers for group in groups)]
        for row, answer in enumerate(answers):
            end = len(answer.ids)
            found.tokens[row, :end] = torch.tensor(answer.ids)
            found.first[row] = answer.prompt
            found.stop[row] = end if row < kept * size else answer.prompt
            found.drawn[row, answer.prompt : end] = torch.tensor(answer.drawn)
            if answer.drawable:
                found.choices[row, answer.prompt : end] = torch.tensor([len(one) for one in answer.drawable])
        found.drawable = torch.cat([found.drawable, *(one for answer in answers for one in answer.drawable)])
        return found

    def _observe(self, groups: Sequence[Group]) -> None:
        """Of all groups, once: the metrics of ranks are added up."""
        metrics = self._observed()
        if metrics is None or not self._job.dist.main:
            return
        rewards = torch.stack([group.rewards for group in groups])
        answers = [one for group in groups for one in group.answers]
        seen = (
            rewards,
            rewards.std(1),
            torch.tensor([float(not group.signal) for group in groups]),
            torch.tensor([float(len(one.drawn)) for one in answers]),
            torch.tensor([float(not one.ended) for one in answers]),
        )
        for name, values in zip(METRICS, seen, strict=True):
            metrics[name].update(values.to(metrics[name].sums.device))

    def _keep_samples(self, groups: Sequence[Group], number: int) -> None:
        if not self._job.dist.main or not self._config.samples:
            return
        pairs = [
            (group.prompt, answer, float(reward))
            for group in groups
            for answer, reward in zip(group.answers, group.rewards, strict=True)
        ]
        apart = max(min(self._config.group - 1, len(pairs) // self._config.samples), 1)  # of different groups, if many
        file = self._job.run.artifact(SAMPLES)
        if not self._kept:
            self._kept = True
            forget(file, number)
        with file.open("a", encoding="utf-8") as lines:
            for prompt, answer, reward in pairs[::apart][: self._config.samples]:
                line = {
                    "rollout": number,
                    "prompt": prompt.text,
                    "answer": self._text(answer),
                    "reward": reward,
                    "tokens": len(answer.drawn),
                    "right": shown(prompt.record),
                }
                lines.write(json.dumps(line, ensure_ascii=False) + "\n")

    def save_template(self) -> None:
        """Complete the tokenizer's files, which exports and `forge generate` read."""
        if self._prompts.chats:
            save_template(self._job, self._config.template, {})

    def record_samples(self) -> None:
        """Note the file of samples among the run's artifacts: at its end."""
        if self._kept:
            self._job.record(self._job.run.artifact(SAMPLES), self._author)


def forget(file: Path, number: int) -> None:
    """Remove the samples of a rollout and of those after it: a run that was killed makes them again."""
    if not file.is_file():
        return
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["rollout"] < number]
    write_whole(file, "".join(kept))
