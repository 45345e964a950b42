"""The base class of optimizers: `step` with or without a closure."""

from __future__ import annotations

from collections.abc import Callable
from typing import overload

import torch


class UpdatingOptimizer(torch.optim.Optimizer):
    """An optimizer whose subclass only says how it updates its parameters, in `update`."""

    def update(self) -> None:
        """Update the parameters that have a gradient; called without autograd."""
        raise NotImplementedError

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update()
        return loss
