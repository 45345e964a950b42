"""What the tests of sharding train."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

import tp_cases
from forge_train import LossFunction, Plugin, hookimpl


class Glance(Plugin):
    """A loss that calls the head once more than it uses what the head gives."""

    api = (1, 0)

    @hookimpl
    def loss(self, job: Any) -> LossFunction:
        def function(hidden: Tensor, head: nn.Module, labels: Tensor) -> Tensor:
            head(hidden[:, :1])
            return F.cross_entropy(head(hidden).float().flatten(0, 1), labels.flatten(), reduction="sum")

        return function


class Wider(Plugin):
    """A model with a vocabulary of 259, of which 6 ranks have uneven rows, and a width that 3 do not divide."""

    api = (1, 0)

    @hookimpl
    def build_model(self, job: Any) -> nn.Module:
        return tp_cases.Model(259)
