"""Forge's own plugins, each with one thing done wrong, for `forge verify` to find. Enable as `sabotage:LateTP`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from forge_train import Applied, BatchPhase, Metric, Phase, Plugin, PrepareBatch, Transform, hookimpl, section
from forge_train_kit.metrics import Sum
from forge_train_plugins.data.text import Text
from forge_train_plugins.feed_forward.swiglu import SwiGLU
from forge_train_plugins.models.decoder import Decoder
from forge_train_plugins.parallel.fsdp2 import FSDP2
from forge_train_plugins.parallel.sequential import Sequential
from forge_train_plugins.parallel.tp import TensorParallel


class LateTP(TensorParallel):
    """Comes after FSDP2 instead of before it."""

    @hookimpl
    def parallelize(self, job: Any) -> Transform | None:
        transform = super().parallelize(job)
        return transform and replace(transform, phase=Phase.SHARD, after=("data_parallel",))


class ForgetfulTP(TensorParallel):
    """Leaves the gradients of norms, which every rank has from its part of the sequence, unsummed."""

    def _apply(self, part: nn.Module, job: Any) -> Applied:
        from forge_train_plugins.parallel._tp import apply as tp

        found = tp.whole_parameters

        def forgetful(*args: Any, **kwargs: Any) -> list[Any]:
            return [replace(w, partial=w.partial and "norm" not in w.name) for w in found(*args, **kwargs)]

        with patch.object(tp, "whole_parameters", forgetful):
            return super()._apply(part, job)


class DoubledFSDP(FSDP2):
    """Averages gradients over half of the ranks."""

    @hookimpl
    def parallelize(self, job: Any) -> Transform | None:
        transform = super().parallelize(job)
        if transform is None:
            return None

        def apply(part: nn.Module) -> Applied:
            applied = transform.apply(part)

            def double() -> None:
                if applied.after_backward:
                    applied.after_backward()
                for parameter in part.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(2)

            return replace(applied, after_backward=double)

        return replace(transform, apply=apply)


class RankText(Text):
    """Begins at another place on every rank."""

    @hookimpl
    def build_data(self, job: Any, split: Any) -> Any:
        loader = super().build_data(job, split)
        loader.skip(job.dist.rank * job.config.train.global_batch)
        return loader


class Misnamed(Decoder):
    """Plans for a linear that it has not."""

    @hookimpl
    def build_model(self, job: Any) -> nn.Module:
        model = super().build_model(job)
        plan = {**model.tensor_plan(), "layers.0.attention.query": "colwise"}
        model.tensor_plan = lambda: plan
        return model


# -- gradients --------------------------------------------------------------------------------------------------------


class LaterNorms(FSDP2):
    """Makes the gradients of norms half as large again, from the second step on."""

    @hookimpl
    def parallelize(self, job: Any) -> Transform | None:
        transform = super().parallelize(job)
        if transform is None:
            return None
        steps = itertools.count(1)

        def apply(part: nn.Module) -> Applied:
            applied = transform.apply(part)

            def enlarge() -> None:
                if applied.after_backward:
                    applied.after_backward()
                if next(steps) > 1:
                    for name, parameter in part.named_parameters():
                        if "norm" in name:
                            parameter.grad.mul_(1.5)

            return replace(applied, after_backward=enlarge)

        return replace(transform, apply=apply)


class AfterNorm(Plugin):
    """Doubles gradients when their norm has been taken."""

    api = (1, 0)

    @hookimpl
    def on_gradients(self, update: Any) -> None:
        if dist.is_initialized():
            for parameter in update.parameters:
                parameter.grad.mul_(2)


class Halved(Plugin):
    """Halves gradients and their norm, which clipping hides from the optimizer."""

    api = (1, 0)

    @hookimpl
    def on_gradients(self, update: Any) -> None:
        if dist.is_initialized():
            update.scale(0.5)


class SavedTwice(Plugin):
    """Has other weights while a checkpoint is saved."""

    api = (1, 0)

    @hookimpl
    def on_start(self, job: Any, model: Any) -> None:
        self._model = model

    @hookimpl
    def around(self, span: str, job: Any) -> Any:
        return self._twice if span == "save" and job.dist.world > 1 else None

    @contextmanager
    def _twice(self) -> Iterator[None]:
        self._scale(2)
        yield
        self._scale(0.5)

    def _scale(self, factor: float) -> None:
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.mul_(factor)


class LostMicroBatch(Sequential):
    """Leaves the last micro-batch of rank 1 out of the gradients, and not out of the loss."""

    @hookimpl
    def executor(self, model: Any, task: Any, job: Any) -> Any:
        executor = super().executor(model, task, job)
        train, loss = executor.train, executor._loss

        def losing(batches: Any, scale: Any) -> Tensor:
            def weighed(batch: Any) -> Tensor:
                value = loss(batch)
                return value if batch is not batches[-1] else value.detach() + 0 * value

            executor._loss = weighed
            return train(batches, scale)

        if job.dist.rank == 1:
            executor.train = losing
        return executor


class Rounded(Plugin):
    """Computes one linear in bf16."""

    api = (1, 0)

    @hookimpl
    def on_start(self, job: Any, model: Any) -> None:
        modules = dict(model.named_modules())
        down = modules["layers.1.feed_forward.down"]
        if job.dist.world > 1:
            down.forward = lambda x: F.linear(x.bfloat16(), down.weight.bfloat16()).float()


# -- the start, and an evaluation -------------------------------------------------------------------------------------


class OtherStart(Plugin):
    """Changes the weights of one rank before the first step; of hooks it has this one alone."""

    api = (1, 0)

    @section
    class Config:
        rank: int = 1

    @hookimpl
    def on_start(self, job: Any, model: Any) -> None:
        if job.dist.world > 1 and job.dist.rank == self.config.rank:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.001)


class InTraining(SwiGLU):
    """Gives less in training than in evaluation, as dropout would without its factor."""

    @hookimpl
    def feed_forward(self, layer: Any, job: Any) -> Any:
        module = super().feed_forward(layer, job)
        module.register_forward_hook(lambda part, args, out: 0.9 * out if part.training else out)
        return module


class TrainedEvaluation(Sequential):
    """Evaluates in training mode."""

    @hookimpl
    def executor(self, model: Any, task: Any, job: Any) -> Any:
        executor = super().executor(model, task, job)

        def evaluate(batch: Any) -> Tensor:
            model.train()
            with torch.no_grad():
                return executor._loss(batch)

        if job.dist.world > 1:
            executor.evaluate = evaluate
        return executor


class _Tokens(Plugin):
    """Counts the tokens of a step, wrongly."""

    api = (1, 0)

    @hookimpl
    def metrics(self, job: Any) -> dict[str, Metric]:
        self.job, self.tokens = job, self.metric()
        return {"tokens": self.tokens}

    def metric(self) -> Any:
        return Sum()

    def count(self, batch: Any) -> Any:
        return torch.tensor(float(batch.inputs.numel()))

    @hookimpl
    def prepare_batch(self, job: Any) -> PrepareBatch:
        def observe(batch: Any) -> Any:
            self.tokens.update(self.count(batch))
            return batch

        return PrepareBatch(BatchPhase.MASK, observe)


class MaxOfSums(_Tokens):
    """Keeps a sum among what the largest is taken of."""

    def metric(self) -> Any:
        class Wrong(Metric):
            def __init__(self) -> None:
                super().__init__(maxima=1)

            def update(self, value: Tensor) -> None:
                self.maxima.clamp_(min=0).add_(value)

            def value(self, sums: Tensor, maxima: Tensor) -> float:
                return float(maxima[0])

        return Wrong()


class SummedTwice(_Tokens):
    """Adds up over ranks what is added up again."""

    def count(self, batch: Any) -> Any:
        return self.job.dist.all_reduce(super().count(batch), axis="data")


class ReplicasTwice(_Tokens):
    """Takes ranks that see the same for ranks that see something of their own."""

    def metric(self) -> Any:
        wrong = Sum()
        wrong.per_rank = True
        return wrong


class OneRank(Plugin):
    """Observes something where there is a rank 1."""

    api = (1, 0)

    @hookimpl
    def metrics(self, job: Any) -> dict[str, Metric]:
        self.job, self.seen = job, Sum()
        return {"rank_one": self.seen}

    @hookimpl
    def on_step(self, step: Any) -> None:
        if self.job.dist.rank == 1:
            self.seen.update(1)
