"""An optimizer of matrices."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from forge_train import ConfigError, Ge, Gt, Le, Plugin, hookimpl, section
from forge_train_kit.sections import Beta, ParameterGroup, StateDtypes

if TYPE_CHECKING:
    import torch

    from forge_train import Job, Model


@section
class ForTheRest:
    """AdamW, for all parameters but hidden matrices."""

    lr: Annotated[float, Gt(0)] = 3e-4
    """Peak learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay of the running means of the gradient and of its square."""
    eps: Annotated[float, Gt(0)] = 1e-8
    """Added to the root of the second."""
    weight_decay: Annotated[float, Ge(0)] = 0.1
    """Of matrices; norms and biases do not decay."""
    decay_embeddings: bool = False
    """Decay the embedding too."""
    match: tuple[str, ...] = ()
    """Patterns of hidden matrices that AdamW updates as well, such as `*.router.weight`."""


class Muon(Plugin):
    """Orthogonalised momentum for hidden matrices, AdamW for everything else (Jordan et al. 2024, arXiv:2502.16982)."""

    api = (1, 0)

    @section
    class Config:
        lr: Annotated[float, Gt(0)] = 3e-4
        """Peak learning rate of hidden matrices; with scale = "rms", AdamW's fits."""
        momentum: Beta = 0.95
        """Decay of the running mean of the gradient."""
        nesterov: bool = True
        """Look one step ahead: orthogonalise the mean of the gradient and the momentum."""
        weight_decay: Annotated[float, Ge(0)] = 0.1
        """Of hidden matrices."""
        coefficients: Literal["quintic", "polar_express"] = "quintic"
        """Polynomials of the Newton–Schulz iteration: one for all steps, or the best for each (arXiv:2505.16932)."""
        steps: Annotated[int, Ge(1), Le(20)] = 5
        """Iterations."""
        dtype: Literal["bf16", "fp32"] = "bf16"
        """Of the iteration, and of what ranks send each other for it."""
        scale: Literal["rms", "spectral"] = "rms"
        """Factor on updates: 0.2 √max(rows, columns), AdamW's root mean square; or √max(1, rows / columns)."""
        eps: Annotated[float, Gt(0)] = 1e-7
        """The least norm that a momentum is divided by."""
        groups: tuple[ParameterGroup, ...] = ()
        """Parameters by pattern, with a learning rate or a decay of their own."""
        adamw: ForTheRest = ForTheRest()
        """Embeddings, head, norms and biases."""
        state: StateDtypes = StateDtypes()
        """Dtypes of the momentum (first), and of AdamW's two moments; masters."""

    config: Config

    @hookimpl
    def optimizer(self, model: Model, job: Job) -> torch.optim.Optimizer:
        import torch

        from forge_train_kit.optim import MatrixOptimizer, NarrowState, at_rest, fused_rows

        from ._muon.rule import Orthogonal

        config = self.config
        rule = Orthogonal(
            coefficients=config.coefficients,
            steps=config.steps,
            dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[config.dtype],
            eps=config.eps,
            scale=config.scale,
        )
        groups = self.groups(model, job)
        kept = at_rest(model, job, config.state, first=("momentum", "exp_avg"), second=("exp_avg_sq",))
        others = [group for group in groups if "betas" in group]
        rest: torch.optim.Optimizer | None = torch.optim.AdamW(others, fused=True) if others else None
        made = MatrixOptimizer(
            [group for group in groups if "momentum" in group],
            rule,
            rest=NarrowState(rest, kept) if rest and not kept.idle else rest,
            rank=job.dist.rank,
            device=job.device,
            fused=fused_rows(model),
            at_rest=None if kept.idle else kept,
        )
        if kept.idle:
            kept.widen_once(made)
        return made

    def groups(self, model: Model, job: Job) -> list[dict[str, Any]]:
        """Hidden matrices with Muon's settings, everything else with AdamW's."""
        from forge_train_kit.optim import decays, hidden_matrices, parameter_groups

        config, rest = self.config, self.config.adamw
        matrices = hidden_matrices(model)
        left_out = {pattern: fnmatch.filter(matrices, pattern) for pattern in rest.match}
        for found in zip(*job.dist.gather_stages([(one, bool(names)) for one, names in left_out.items()]), strict=True):
            if not any(hit for _, hit in found) and job.dist.complete:
                raise ConfigError(f"muon.adamw.match: {found[0][0]!r} matches no hidden matrix.")
        matrices -= {name for names in left_out.values() for name in names}
        muon = {
            "lr": config.lr,
            "weight_decay": config.weight_decay,
            "momentum": config.momentum,
            "nesterov": config.nesterov,
        }

        def settings(name: str, parameter: torch.Tensor) -> Mapping[str, Any]:
            if name in matrices:
                return muon
            decaying = decays(model, name, parameter, embeddings=rest.decay_embeddings)
            decay = rest.weight_decay if decaying else 0.0
            return {"lr": rest.lr, "weight_decay": decay, "betas": rest.betas, "eps": rest.eps}

        return parameter_groups(model, job, settings, config.groups)
