"""The base class of optimizers: `step` with or without a closure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import overload

import torch


class UpdatingOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer whose subclass implements `update`; `step` calls it after the closure, if there is one."""

    @abstractmethod
    def update(self) -> None:
        """Update the parameters that have a gradient; called without autograd."""

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
