"""Rewards: a head that scores a text, and the task that trains it on preferences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from forge_train import Plugin, Preparation, Task, hookimpl
from forge_train_kit.heads import Head, HeadSpec

if TYPE_CHECKING:
    from forge_train import Job, Metric, Model


class Reward(Plugin):
    """A reward model: one number per text, from the hidden state of its last token.

    The loss is Bradley and Terry's, `−log σ(r(chosen) − r(rejected))` (InstructGPT, arXiv:2203.02155, eq. 1),
    averaged over pairs. The head is the one of transformers' `…ForSequenceClassification` with one label.
    `reward.accuracy` is the share of pairs whose chosen answer has the higher reward, and `reward.margin` is the mean
    difference of the two.
    """

    api = (1, 0)
    facts = {"plan.per_unit": True}
    gives: ClassVar[Mapping[str, str]] = {"head": "rewards", "task": "rewards"}
    takes: ClassVar[Mapping[str, tuple[str, ...]]] = {"head": ("rewards",), "build_data": ("pairs",)}

    _observed: Mapping[str, Metric] | None = None

    @hookimpl
    def head(self, spec: HeadSpec, job: Job) -> Head:
        from ._reward import RewardHead

        return RewardHead(spec.dim, std=spec.std)

    @hookimpl
    def prepare_batch(self) -> Preparation:
        from forge_train_kit.model import prepare_pooling

        return prepare_pooling("last")

    @hookimpl
    def task(self, job: Job) -> Task:
        from ._reward import Preferences

        return Preferences(job, lambda: self._observed)

    @hookimpl
    def record_outputs(self, task: Task) -> Mapping[str, Callable[..., Mapping[str, Any]]]:
        return {"reward": lambda *of: {"reward": task.outputs(*of)}}

    @hookimpl
    def metrics(self, model: Model, job: Job) -> Mapping[str, Metric]:
        from forge_train_kit.metrics import Mean

        self._observed = {"accuracy": Mean(), "margin": Mean()}
        return self._observed
