"""`schedule_free` with a wrong average on several ranks, for `forge verify` to find."""

from __future__ import annotations

from typing import Any

import torch

from forge_train import Span, SpanName, hookimpl
from forge_train_plugins.optimizers._schedule_free import ScheduleFreeAdamW, averaged
from forge_train_plugins.optimizers.schedule_free import ScheduleFree


class _Equal(ScheduleFreeAdamW):
    """Gives every step the weight of the first."""

    def _update(self, y: list[torch.Tensor], step: int, weight: float, group: dict[str, Any]) -> None:
        super()._update(y, step, 0.0, group)


class EqualShares(ScheduleFree):
    """An average that is the last point."""

    @hookimpl
    def optimizer(self, model: Any, job: Any) -> torch.optim.Optimizer:
        made = super().optimizer(model, job)
        if job.dist.world > 1:
            made.__class__ = _Equal
        return made


class WrongAverage(ScheduleFree):
    """Evaluates a point that lies beyond the average."""

    @hookimpl
    def around(self, span: SpanName, job: Any) -> Span | None:
        if span != "evaluate":
            return None
        return lambda: averaged(self._optimizer, 0.9 if job.dist.world == 1 else 0.5)
