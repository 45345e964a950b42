"""The metrics of each depth."""

from __future__ import annotations

from torch import Tensor

from forge_train import Metric
from forge_train_kit.metrics import Ratio


class Measures:
    """Mean loss and share of correctly predicted tokens of each depth."""

    def __init__(self, depths: int) -> None:
        self.depths = depths
        self.losses, self.hits = [Ratio() for _ in range(depths)], [Ratio() for _ in range(depths)]

    @property
    def metrics(self) -> dict[str, Metric]:
        """By name: `loss.1`, `accuracy.1`, …"""
        both = {"loss": self.losses, "accuracy": self.hits}
        return {f"{name}.{at}": one for name, of in both.items() for at, one in enumerate(of, start=1)}

    def update(self, seen: Tensor) -> None:
        """Add the summed losses, the correct guesses and the label counts of each depth, `[3, depths]`."""
        losses, hits, labels = seen.unbind()
        for depth in range(self.depths):
            self.losses[depth].update(losses[depth], labels[depth])
            self.hits[depth].update(hits[depth], labels[depth])
