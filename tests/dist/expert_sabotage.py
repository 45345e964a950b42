"""Experts with one thing done wrong, for `forge verify` to find. Enable as `expert_sabotage:Unscaled`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from forge_train import Applied, Transform, hookimpl
from forge_train.compose.initialise import local_window
from forge_train_kit.model import record_choices
from forge_train_plugins.experts._moe.block import Routed
from forge_train_plugins.experts._moe.router import Router, kept
from forge_train_plugins.experts._moe.watch import Watch
from forge_train_plugins.experts.moe import MoE
from forge_train_plugins.parallel.ep import ExpertParallel
from forge_train_plugins.parallel.fsdp2 import FSDP2


class Unscaled(ExpertParallel):
    """Leaves the gradients of experts as large as their mesh makes them."""

    @hookimpl
    def parallelize(self, job: Any) -> Transform | None:
        transform = super().parallelize(job)
        return transform and replace(transform, apply=lambda part: replace(transform.apply(part), after_backward=None))


class Plain(ExpertParallel):
    """Gives each rank its experts as plain tensors, so that all of them save theirs under one name."""

    @hookimpl
    def parallelize(self, job: Any) -> Transform | None:
        transform = super().parallelize(job)

        def apply(part: nn.Module) -> Applied:
            assert transform is not None
            applied = transform.apply(part)
            for name in applied.matched:
                module = part.get_submodule(name)
                for key, parameter in module._parameters.items():
                    module._parameters[key] = nn.Parameter(parameter.to_local())  # type: ignore[union-attr]
            return applied

        return transform and replace(transform, apply=apply)


class Selfish(MoE):
    """Moves biases by the load of each rank alone."""

    @hookimpl
    def on_step(self, step: Any) -> None:
        with patch.object(
            Watch, "_counted", lambda self: torch.stack([one.statistics for one in self.layers.values()])
        ):
            super().on_step(step)


class Unsummed(FSDP2):
    """Leaves in a router's shard what the tokens of that shard's rank alone give."""

    @hookimpl
    def parallelize(self, job: Any) -> Transform | None:
        transform = super().parallelize(job)
        return transform and replace(transform, apply=partial(_unsummed, transform.apply))


def _unsummed(apply: Callable[[nn.Module], Applied], part: nn.Module) -> Applied:
    applied = apply(part)
    routers = {name: one for name, one in part.named_modules() if isinstance(one, Router)}
    own: dict[str, list[Tensor]] = {name: [] for name in routers}

    def listen(name: str, x: Tensor, found: Any) -> None:
        if found.logits.requires_grad:
            found.logits.register_hook(lambda gradient: own[name].append(gradient.mT @ x.detach().float()))

    def put_back() -> None:
        if applied.after_backward:
            applied.after_backward()
        for name, router in routers.items():
            shard, place = local_window(router.weight.grad)
            shard.copy_(sum(own[name])[tuple(slice(*span) for span in place)])  # type: ignore[index]
            own[name].clear()

    for name, router in routers.items():
        router.register_forward_hook(lambda module, args, found, name=name: listen(name, args[0], found))
    return replace(applied, after_backward=put_back)


class Deaf(MoE):
    """Gives the router no gradient through the weights of what it chose, on several ranks."""

    @hookimpl
    def on_start(self, job: Any, model: Any, optimizer: Any) -> None:
        super().on_start(job, model, optimizer)
        if job.dist.world > 1:
            for _, module in model.named_modules():
                if isinstance(module, Routed):
                    _deafen(module)


def _deafen(module: Routed) -> None:
    right = module.transport
    collect = right.combine

    def combine(rows: Tensor, weights: Tensor, handle: Any) -> Tensor:
        return collect(rows, weights.detach(), handle)

    right.combine = combine  # type: ignore[method-assign]


class Tied(MoE):
    """Has two experts equal up to rounding, which falls one way on one process and the other way on several."""

    @hookimpl
    def on_start(self, job: Any, model: Any, optimizer: Any) -> None:
        super().on_start(job, model, optimizer)
        factor = 1 + (1e-6 if job.dist.world > 1 else -1e-6)
        _choose_by(model, lambda scores: torch.cat([scores[:, :1], factor * scores[:, :1], scores[:, 2:]], dim=1))


class Shifted(MoE):
    """Adds a hundredth to the scores of one expert of the last layer, on several ranks."""

    @hookimpl
    def on_start(self, job: Any, model: Any, optimizer: Any) -> None:
        super().on_start(job, model, optimizer)
        if job.dist.world > 1:
            shift = torch.zeros(self.config.experts).index_fill(0, torch.tensor(1), 0.01)
            _choose_by(model, lambda scores: scores + shift, only="layers.1.")


def _choose_by(model: Any, change: Callable[[Tensor], Tensor], only: str = "") -> None:
    for name, module in model.named_modules():
        if isinstance(module, Router) and name.startswith(only):
            module._choose = partial(_changed, module._choose, change)  # type: ignore[method-assign]


def _changed(right: Callable[[Tensor], Tensor], change: Callable[[Tensor], Tensor], scores: Tensor) -> Tensor:
    return right(change(scores))


class Unbalanced(MoE):
    """Doubles the balance loss, on several ranks."""

    @hookimpl
    def on_start(self, job: Any, model: Any, optimizer: Any) -> None:
        super().on_start(job, model, optimizer)
        for routed in _routed(model) if job.dist.world > 1 else ():
            routed.losses = replace(routed.losses, balance=2 * routed.losses.balance)


class OwnCapacity(MoE):
    """Has each rank drop tokens by its own share of the micro-batch, on several ranks."""

    @hookimpl
    def on_start(self, job: Any, model: Any, optimizer: Any) -> None:
        super().on_start(job, model, optimizer)
        for routed in _routed(model) if job.dist.world > 1 else ():
            routed._within_capacity = partial(_within, routed)  # type: ignore[method-assign]


def _within(routed: Routed, routing: Any, batch: int) -> Tensor:
    experts, weights = routing.experts, routing.weights.detach()
    limit = -(-len(experts) * experts.shape[1] // routed.count)
    stays = kept(experts, weights, limit, routed.count)

    def made() -> tuple[Tensor, Tensor]:
        scores = weights.new_full((len(weights), routed.count), -torch.inf)
        taken = torch.zeros_like(scores, dtype=torch.bool).scatter(1, experts, stays)
        return scores.scatter(1, experts, weights), taken

    record_choices(routed, "tokens within the capacity", made, among="tokens")
    return stays


def _routed(model: Any) -> list[Routed]:
    return [module for _, module in model.named_modules() if isinstance(module, Routed)]
