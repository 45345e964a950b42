"""The optimizer of the `lion` plugin."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from forge_train_kit.optim import UpdatingOptimizer


class SignMomentum(UpdatingOptimizer):
    """Lion (arXiv:2302.06675, algorithm 2), with decoupled weight decay λ:

    c = β₁ m + (1 − β₁) g;  θ ← θ − lr (sign(c) + λ θ);  m ← β₂ m + (1 − β₂) g
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update(self) -> None:
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            weights = [p for p in group["params"] if p.grad is not None]
            if not weights:
                continue
            gradients = [p.grad for p in weights]
            momenta = [self._momentum(p) for p in weights]
            updates = torch._foreach_lerp(momenta, gradients, 1 - beta1)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
            torch._foreach_add_(weights, updates, alpha=-lr)
            torch._foreach_lerp_(momenta, gradients, 1 - beta2)

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum: Tensor = state["momentum"]
        return momentum
