"""A task for pairs, as a stranger writes one. As `pair_task:Contrast`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch.nn.functional as F

from forge_train import MASKED, Plugin, hookimpl


class Contrast(Plugin):
    """The chosen answer is to be likelier than the rejected one: −log σ(their mean log-likelihoods' difference)."""

    api = (1, 0)
    takes: ClassVar[Mapping[str, tuple[str, ...]]] = {"build_data": ("pairs",)}

    @hookimpl
    def task(self, job: Any) -> Any:
        return Task()


class Task:
    def weight(self, batch: Any) -> int:
        return len(batch.inputs) // 2

    def loss(self, part: Any, hidden: Any, batch: Any) -> Any:
        logits = self.outputs(part, hidden, batch).float().flatten(0, 1)
        each = F.cross_entropy(logits, batch.labels.flatten(), ignore_index=MASKED, reduction="none")
        likely = -each.view(batch.labels.shape).sum(1) / (batch.labels != MASKED).sum(1)
        chosen, rejected = likely[batch.targets["member"] == 0], likely[batch.targets["member"] == 1]
        return -F.logsigmoid(chosen - rejected).sum()

    def outputs(self, part: Any, hidden: Any, batch: Any) -> Any:
        return part.get_submodule("head")(hidden)
