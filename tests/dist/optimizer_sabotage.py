"""AdamW with one thing done wrong, for `forge verify` to find. Enable as `optimizer_sabotage:NoDecay`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from forge_train import hookimpl
from forge_train_plugins.optimizers.adamw import AdamW


class Deviant(AdamW):
    """Takes its steps with other settings than its parameter groups show."""

    changes: Mapping[str, Any] = {}

    @hookimpl
    def optimizer(self, model: Any, job: Any) -> torch.optim.Optimizer:
        optimizer = super().optimizer(model, job)
        kept: list[dict[str, Any]] = []

        def deviate(*ignored: Any) -> None:
            kept[:] = [dict(group) for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group.update({key: change(group[key]) for key, change in self.changes.items()})

        def hide(*ignored: Any) -> None:
            for group, before in zip(optimizer.param_groups, kept, strict=True):
                group.update(before)

        if self.deviates(job):
            optimizer.register_step_pre_hook(deviate)
            optimizer.register_step_post_hook(hide)
        return optimizer

    def deviates(self, job: Any) -> bool:
        return bool(job.dist.world > 1)


class NoDecay(Deviant):
    """Does not decay weights."""

    changes: Mapping[str, Any] = {"weight_decay": lambda decay: 0.0}


class LessDecay(NoDecay):
    """Does not decay the weights of rank 1."""

    def deviates(self, job: Any) -> bool:
        return bool(job.dist.rank == 1)


class OtherBeta(Deviant):
    """Has another running mean of squares."""

    changes: Mapping[str, Any] = {"betas": lambda betas: (betas[0], 0.999)}


class Faster(Deviant):
    """Takes steps one percent larger."""

    changes: Mapping[str, Any] = {"lr": lambda lr: 1.01 * lr}


class Unclipped(AdamW):
    """Gives gradients back the norm that they had before clipping."""

    @hookimpl
    def optimizer(self, model: Any, job: Any) -> torch.optim.Optimizer:
        optimizer = super().optimizer(model, job)

        def stretch(*ignored: Any) -> None:
            factor = (self.norm + 1e-6) / job.config.train.clip_norm
            for parameter in model.parameters():
                parameter.grad.mul_(factor.clamp(min=1.0))

        if job.dist.world > 1:
            optimizer.register_step_pre_hook(stretch)
        return optimizer

    @hookimpl
    def on_gradients(self, update: Any) -> None:
        self.norm = update.grad_norm


class OtherGroups(AdamW):
    """Has other settings on several ranks, for everyone to see."""

    @hookimpl
    def optimizer(self, model: Any, job: Any) -> torch.optim.Optimizer:
        optimizer = super().optimizer(model, job)
        for group in optimizer.param_groups if job.dist.world > 1 else ():
            group["betas"] = (0.9, 0.999)
        return optimizer


class OwnNorm(Unclipped):
    """Clips on each rank by the norm of what the rank holds."""

    @hookimpl
    def optimizer(self, model: Any, job: Any) -> torch.optim.Optimizer:
        optimizer, limit = super().optimizer(model, job), job.config.train.clip_norm

        def clip(*ignored: Any) -> None:
            held = [getattr(one.grad, "to_local", lambda one=one: one.grad)() for one in model.parameters()]
            norm = torch.stack([one.square().sum() for one in held]).sum().sqrt()
            for one in held:
                one.mul_((limit / (norm + 1e-6)).clamp(max=1.0))

        if job.dist.world > 1:
            optimizer.register_step_pre_hook(clip)
        return optimizer
