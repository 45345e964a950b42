"""A variant of Muon, as an outside author would write it: a rule for full matrices, and nothing about sharding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from forge_train import Ge, Gt, Le, Lt, Plugin, hookimpl, section
from forge_train_kit.sections import ParameterGroup

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from forge_train import Job, Model
    from forge_train_kit.optim import Kept

Beta = Annotated[float, Ge(0), Lt(1)]


class NorMuon(Plugin):
    """Muon whose rows are divided by their running root mean square (Li et al. 2025, arXiv:2510.05491, algorithm 1)."""

    api = (1, 0)

    @section
    class Config:
        lr: Annotated[float, Gt(0)] = 3e-4
        """Peak learning rate, of AdamW's size for all parameters."""
        momentum: Beta = 0.95
        """Decay of the running mean of the gradient."""
        beta2: Beta = 0.95
        """Decay of the running mean of squares of each row of the orthogonalised update."""
        weight_decay: Annotated[float, Ge(0)] = 0.1
        """Of matrices; norms and biases do not decay."""
        steps: Annotated[int, Ge(1), Le(20)] = 5
        """Newton–Schulz iterations, in fp32."""
        groups: tuple[ParameterGroup, ...] = ()
        """Parameters by pattern, with a learning rate or a decay of their own."""

    config: Config

    @hookimpl
    def optimizer(self, model: Model, job: Job) -> torch.optim.Optimizer:
        import torch

        from forge_train_kit.optim import MatrixOptimizer, decays, fused_rows, hidden_matrices, parameter_groups

        config, matrices = self.config, hidden_matrices(model)
        normuon = {"momentum": config.momentum, "nesterov": False}
        adamw = {"betas": (0.9, 0.95), "eps": 1e-8}

        def settings(name: str, parameter: Tensor) -> Mapping[str, Any]:
            decay = config.weight_decay if decays(model, name, parameter, embeddings=False) else 0.0
            return {"lr": config.lr, "weight_decay": decay, **(normuon if name in matrices else adamw)}

        groups = parameter_groups(model, job, settings, config.groups)
        rest = [group for group in groups if "betas" in group]
        return MatrixOptimizer(
            [group for group in groups if "momentum" in group],
            NormalisedRows(config.beta2, config.steps),
            rest=torch.optim.AdamW(rest) if rest else None,
            rank=job.dist.rank,
            device=job.device,
            fused=fused_rows(model),
        )


class NormalisedRows:
    """O = UVᵀ of the momentum; v ← β₂ v + (1 − β₂) mean of squares of each row of O; O / √v, at a root mean square of
    0.2."""

    keeps: Mapping[str, Kept] = {"second_moment": "rows"}

    def __init__(self, beta2: float, steps: int) -> None:
        import torch

        self.beta2, self.steps, self.dtype = beta2, steps, torch.float32

    def factor(self, rows: int, columns: int) -> float:
        return 0.2

    def direction(self, momentum: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """`[matrices, rows, columns]`; the second moment is `[matrices, rows, 1]`."""
        update = orthogonal(momentum, self.steps)
        second = state["second_moment"].lerp_(update.square().mean(-1, keepdim=True), 1 - self.beta2)
        update = update / (second.sqrt() + 1e-8)
        return update / update.square().mean((-2, -1), keepdim=True).sqrt().clamp(min=1e-8)


def orthogonal(x: Tensor, steps: int) -> Tensor:
    """U Vᵀ of U S Vᵀ by the quintic iteration (Jordan et al. 2024), in the wide orientation."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.square().sum((-2, -1), keepdim=True).sqrt().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x
