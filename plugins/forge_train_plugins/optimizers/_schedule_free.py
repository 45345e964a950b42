"""The optimizer of the `schedule_free` plugin."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from forge_train_kit.optim import UpdatingOptimizer


class ScheduleFreeAdamW(UpdatingOptimizer):
    """Schedule-free AdamW (arXiv:2405.15682, algorithm 1). The parameters hold y, where gradients are taken:

    v ← β₂ v + (1 − β₂) g²;  d = g / (√(v / (1 − β₂ᵗ)) + ε) + λ y;  c = lr² / Σ lr²
    z ← z − lr d;  x ← (1 − c) x + c z;  y = (1 − β₁) z + β₁ x

    x, the average, is not kept: it follows from y and z.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def update(self) -> None:
        for group in self.param_groups:
            alike: dict[tuple[int, float], list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self._state(parameter)
                    alike.setdefault((state["step"], state["weight"]), []).append(parameter)
            for (step, weight), parameters in alike.items():
                self._update(parameters, step + 1, weight, group)

    def _update(self, y: list[Tensor], step: int, weight: float, group: dict[str, Any]) -> None:
        """Of parameters that have taken as many steps, of the same sizes."""
        lr, eps, (beta1, beta2) = group["lr"], group["eps"], group["betas"]
        states = [self.state[parameter] for parameter in y]
        weight += lr * lr
        share = lr * lr / weight
        for state in states:
            state["step"], state["weight"] = step, weight
        z, squares = ([state[key] for state in states] for key in ("z", "exp_avg_sq"))
        gradients = [parameter.grad for parameter in y if parameter.grad is not None]
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
        direction = torch._foreach_sqrt(squares)
        torch._foreach_div_(direction, math.sqrt(1 - beta2**step))
        torch._foreach_add_(direction, eps)
        torch._foreach_reciprocal_(direction)
        torch._foreach_mul_(direction, gradients)
        torch._foreach_add_(direction, y, alpha=group["weight_decay"])
        # The paper's three lines in terms of y and z alone.
        torch._foreach_lerp_(y, z, share)
        torch._foreach_add_(y, direction, alpha=lr * (beta1 * (1 - share) - 1))
        torch._foreach_add_(z, direction, alpha=-lr)

    def _state(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            z, squares = parameter.detach().clone(), torch.zeros_like(parameter)
            state.update(step=0, weight=0.0, z=z, exp_avg_sq=squares)
        return state


def shares(beta1: float) -> tuple[float, float]:
    """Factors of y and z in x."""
    return 1 / beta1, 1 - 1 / beta1


@contextmanager
def averaged(optimizer: torch.optim.Optimizer, beta1: float) -> Iterator[None]:
    """Have the parameters hold x within the block, and then, to the bit, y again."""
    of_y, of_z = shares(beta1)
    kept: list[tuple[Tensor, Tensor]] = []
    try:
        for parameter, state in optimizer.state.items():
            if "z" in state:
                y = parameter.detach()
                kept.append((y, y.clone()))
                y.mul_(of_y).add_(state["z"], alpha=of_z)
        yield
    finally:
        for parameter, y in kept:
            parameter.copy_(y)
