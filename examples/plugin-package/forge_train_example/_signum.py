"""The optimizer of the `signum` plugin: its own module, because it needs torch to be defined."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from forge_train_kit.optim import UpdatingOptimizer


class SignDescent(UpdatingOptimizer):
    """m ← β m + (1 − β) g;  θ ← θ − lr sign(m)."""

    def __init__(self, parameters: Iterable[torch.Tensor], *, lr: float, momentum: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    def update(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum"] = torch.zeros_like(weight)
                state["momentum"].lerp_(weight.grad, 1 - group["momentum"])
                weight.add_(state["momentum"].sign(), alpha=-group["lr"])
