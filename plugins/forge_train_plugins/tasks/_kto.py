"""The task of the `kto` plugin, and the reference point of its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forge_train import Axes, Batch, Executor, Job, Metric, Model
from forge_train.plugin import hookspecs
from forge_train_kit.data.mismatched import DESIRABLE, split_mismatched
from forge_train_kit.metrics import Mean
from forge_train_kit.reference.scores import AnswerScores

if TYPE_CHECKING:
    from .kto import KTO

POINT = "reference_point"
"""The target with z0 of the step, 0-dim fp32."""


@dataclass
class JudgedAnswers(AnswerScores):
    """Each row is an answer, desirable or not; every answer counts once."""

    config: KTO.Config

    def weight(self, batch: Batch) -> int:
        return int((batch.targets[DESIRABLE] >= 0).sum())

    def loss(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        config, point = self.config, batch.targets[POINT]
        chosen, rejected = ((batch.targets[DESIRABLE] == one).float() for one in (1, 0))
        sums, tokens, ratio = self.ratios(part, hidden, batch)
        if (metrics := self.observed()) is not None:
            rewards = config.beta * ratio.detach()
            metrics["chosen_reward"].update(rewards, weights=chosen)
            metrics["rejected_reward"].update(rewards, weights=rejected)
            metrics["margin"].update(rewards, chosen, rejected)
            metrics["kl"].update(point, weights=(chosen + rejected).sum())
        gain = config.beta * (ratio - point) * (chosen - rejected)
        weights = config.desirable_weight * chosen + config.undesirable_weight * rejected
        each = weights * torch.sigmoid(-gain)  # σ(−x) = 1 − σ(x), without its rounding
        if smoothing := config.label_smoothing:
            swapped = config.undesirable_weight * chosen + config.desirable_weight * rejected
            each = (1 - smoothing) * each + smoothing * swapped * torch.sigmoid(gain)
        if config.sft_weight:
            each = each - config.sft_weight * chosen * sums / tokens
        return each.sum()

    def ratios(
        self, part: nn.Module, hidden: Tensor, batch: Batch, *, gathered: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same as `compared`; the last one is per token, if the section says so."""
        sums, tokens, ratio = self.compared(part, hidden, batch, gathered=gathered)
        return sums, tokens, ratio / tokens if self.config.length_normalised else ratio


@dataclass
class _Divergence:
    """A task whose sum is that of the log-ratios, r, of the rows that count."""

    scores: JudgedAnswers

    def weight(self, batch: Batch) -> int:
        return self.scores.weight(batch)

    def loss(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        ratio = self.scores.ratios(part, hidden, batch, gathered=True)[2]
        return (ratio * (batch.targets[DESIRABLE] >= 0)).sum()

    def outputs(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        return self.scores.outputs(part, hidden, batch)


class ReferencePoint:
    """Gives every micro-batch of a step z0, the same for all: for `prepare_batch`.

    It sees all mismatched answers of the global batch, so that z0 depends neither on the size of micro-batches nor on
    the layout. The run's executor computes them, as in an evaluation.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._model: Model | None = None
        self._task: _Divergence
        self._executor: Executor | None = None
        self._prepare: Callable[[Sequence[Batch]], list[Batch]] | None = None

    def bind(self, model: Model, task: JudgedAnswers) -> None:
        """Measure a model. Without one, as in a trial of a plugin, z0 is that of a model like its reference: 0."""
        self._model, self._task, self._executor = model, _Divergence(task), None

    def __call__(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        views = [split_mismatched(batch) for batch in batches]
        if any(len(view) == 1 for view in views):  # mismatched ones, which are prepared as well
            return batches
        if self._model is None or batches[0].inputs.is_meta:
            point = torch.zeros((), device=batches[0].inputs.device)
        else:
            point = self._measured(self._model, [other for _, other in views])
        return [own.with_targets({POINT: point}, Axes(batch=None)) for own, _ in views]

    def _measured(self, model: Model, batches: Sequence[Batch]) -> Tensor:
        """`max(0, mean r)` over the batches of all ranks, 0-dim fp32 on the device."""
        job, step = self._job, self._job.step
        self._executor = self._executor or hookspecs.executor(model, self._task, job)
        count = torch.tensor(float(sum(self._task.weight(batch) for batch in batches)), dtype=torch.float64)
        total = torch.zeros((), dtype=torch.float64, device=job.device)
        self._prepare = self._prepare or job.hooks.prepare_batch()
        moved = [batch.to(job.device) for batch in self._prepare(batches)]
        step.batches = moved
        try:
            for batch in moved:
                step.batch = batch
                total += self._executor.evaluate(batch)
        finally:
            step.end()
        model.free_gathered()
        if job.dist.world > 1:
            job.dist.all_reduce(total, axis="loss")
            job.dist.all_reduce(count, axis="data")
        return (total / (float(count) or 1.0)).clamp(min=0).float()


class Difference(Metric):
    """The difference of two weighted means; left out while one of them is of nothing, as a mean is."""

    def __init__(self) -> None:
        super().__init__(sums=4)

    def update(self, values: Tensor, first: Tensor, second: Tensor) -> None:
        """Observe values `[rows]`, with the weights `[rows]` of both means."""
        for at, weights in ((0, first), (2, second)):
            self.sums[at].add_((values.double() * weights).sum())
            self.sums[at + 1].add_(weights.sum())

    def value(self, sums: Tensor, maxima: Tensor) -> float | Mapping[str, float]:
        return float(sums[0] / sums[1] - sums[2] / sums[3]) if bool(sums[1] * sums[3]) else {}


def make_metrics() -> Mapping[str, Any]:
    """The plugin's metrics by name."""
    return {"chosen_reward": Mean(), "rejected_reward": Mean(), "margin": Difference(), "kl": Mean()}
