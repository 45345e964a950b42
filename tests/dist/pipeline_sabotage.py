"""Pipelines with one thing done wrong, for `forge verify` to find. Enable as `pipeline_sabotage:Untied`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from forge_train import Applied, Executor, Transform, hookimpl
from forge_train_kit.pipeline import Action
from forge_train_plugins.experts.moe import MoE
from forge_train_plugins.parallel._pp.step import Step
from forge_train_plugins.parallel.pp import PipelineParallel


class _Changed(PipelineParallel):
    """With something else done to what the transform gives."""

    def change(self, applied: Applied) -> Applied:
        raise NotImplementedError

    @hookimpl
    def parallelize(self, job: Any) -> Transform | None:
        transform = super().parallelize(job)
        return transform and replace(transform, apply=lambda model: self.change(transform.apply(model)))


class Untied(_Changed):
    """Leaves the gradients of copies where they are."""

    def change(self, applied: Applied) -> Applied:
        return replace(applied, after_backward=None)


class Resharding(_Changed):
    """Does not say that backward passes are split, so that FSDP2 drops weights between their halves."""

    def change(self, applied: Applied) -> Applied:
        for part in applied.model:  # type: ignore[union-attr]
            part.split_backward = False
        return applied


class Stale(PipelineParallel):
    """Never refreshes copies after the first step."""

    @hookimpl
    def executor(self, model: Any, task: Any, job: Any) -> Executor:
        made: Any = super().executor(model, task, job)
        if made._ties is not None:
            made._ties.forget = lambda: None
        return made  # type: ignore[no-any-return]


class Dropping(PipelineParallel):
    """Loses the weights' gradients of the second micro-batch on the last part."""

    @hookimpl
    def executor(self, model: Any, task: Any, job: Any) -> Executor:
        made: Any = super().executor(model, task, job)
        train = made.train

        def dropping(batches: Any, scale: Any) -> Any:
            with patch.object(Step, "_backward", _lossy(Step._backward)):
                return train(batches, scale)

        made.train = dropping
        return made  # type: ignore[no-any-return]


def _lossy(right: Any) -> Any:
    def backward(step: Step, action: Action) -> None:
        part = step._parts[action.part]
        kept = {p: None if p.grad is None else p.grad.clone() for p in part.parameters()}
        right(step, action)
        if action.part == step._count - 1 and action.micro_batch == 1:
            for parameter, before in kept.items():
                parameter.grad = before

    return backward


class BiasTwice(MoE):
    """The second stage moves its router biases twice a step."""

    @hookimpl
    def on_step(self, step: Any) -> None:
        move = self._watch._move_biases

        def twice(seen: torch.Tensor) -> None:
            move(seen)
            if 0 not in self._watch.layers:
                move(seen)

        with patch.object(self._watch, "_move_biases", twice):
            super().on_step(step)
