"""Per-source metrics of a mixture, in training and on held-out text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from forge_train import MASKED, Batch, Loader, Metric
from forge_train.plugin import hookspecs
from forge_train_kit import metrics
from forge_train_kit.contract import Evaluator
from forge_train_kit.data.loader import SOURCE, StreamLoader
from forge_train_kit.data.stream import HELD_OUT_SEED, Ordered
from forge_train_kit.losses import LABEL_WEIGHTS
from forge_train_kit.model import full_tensor

if TYPE_CHECKING:
    from forge_train import Job
    from forge_train_kit.data.rows import Rows


class BySource(Metric):
    """A number for each source: a sum, or a sum over another one.

    Args:
        names: of the sources.
        mean: whether sums are divided; a source with nothing below is then left out.
    """

    def __init__(self, names: Sequence[str], *, mean: bool) -> None:
        super().__init__(sums=(1 + mean) * len(names))
        self._names, self._mean = tuple(names), mean

    def update(self, *sums: Tensor) -> None:
        """One tensor, or two, `[sources]` float64."""
        self.sums.add_(torch.cat(sums))

    def value(self, sums: Tensor, maxima: Tensor) -> dict[str, float]:
        above, below = sums.view(1 + self._mean, -1)[[0, -1]].tolist()
        if not self._mean:
            return dict(zip(self._names, above, strict=True))
        parts = zip(self._names, above, below, strict=True)
        return {name: one / other for name, one, other in parts if other}


class Losses:
    """Sums up the losses of sequences by their source, on the device. Listens to training steps.

    Args:
        names: of the sources, by their number.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.loss, self.tokens = BySource(names, mean=True), BySource(names, mean=False)
        self._count = len(names)

    def __call__(self, batch: Batch, losses: Tensor) -> None:
        source = batch.targets.get(SOURCE)
        if source is None:  # a plugin replaced the batch
            return
        # A product, because adding by index adds in any order on a GPU.
        mine = (source == torch.arange(self._count, device=source.device)[:, None]).double()
        kept, weights = batch.labels != MASKED, batch.targets.get(LABEL_WEIGHTS)
        tokens = mine @ kept.sum(1).double()
        counted = tokens if weights is None else mine @ (weights.double() * kept).sum(1)
        self.loss.update(mine @ losses.double(), counted)
        self.tokens.update(tokens)


def held_out_loss(name: str, rows: Rows, job: Job) -> Evaluator:
    """The loss on a source's held-out rows, as the task has it."""
    task, mean = hookspecs.task(job), metrics.Mean()

    def measure(part: nn.Module, hidden: Tensor, batch: Batch) -> None:
        weight = task.weight(batch)
        loss = full_tensor(task.loss(part, hidden, batch).detach())
        mean.update(loss / (weight or 1), weights=loss.new_tensor(weight))

    def data() -> Loader:
        return StreamLoader(Ordered(rows, HELD_OUT_SEED, key="mixture", fixed=True), job)

    return Evaluator(name, data, measure, {"loss": mean})
