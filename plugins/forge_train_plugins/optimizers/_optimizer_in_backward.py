"""An optimizer's step, one parameter at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from forge_train import ConfigError


def update_in_backward(optimizer: torch.optim.Optimizer, squares: list[Tensor]) -> None:
    """Have an optimizer update each of its parameters once its gradient is whole, and free that.

    Args:
        optimizer: one that treats each parameter by itself, and leaves out those without a gradient.
        squares: gets the square of each gradient's norm, 0-dim.
    """

    def update(parameter: Tensor) -> None:
        assert parameter.grad is not None
        squares.append(torch.linalg.vector_norm(parameter.grad, dtype=torch.float32) ** 2)
        before = [dict(group) for group in optimizer.param_groups]
        optimizer.step()
        for group, old in zip(optimizer.param_groups, before, strict=True):
            if changed := [key for key, value in group.items() if old.get(key) is not value]:
                raise ConfigError(
                    f"optimizer_in_backward: {type(optimizer).__name__} keeps {changed[0]!r} for all its parameters "
                    "together, and can't update one at a time."
                )
        parameter.grad = None

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.register_post_accumulate_grad_hook(update)
