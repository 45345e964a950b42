"""Forge's own plugins, each with one thing done wrong, for `forge verify` to find. Enable as `sabotage:LateTP`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch import nn

from forge_train import Applied, Phase, Transform, hookimpl
from forge_train_plugins.decoder import Decoder
from forge_train_plugins.fsdp2 import FSDP2
from forge_train_plugins.text import Text
from forge_train_plugins.tp import TensorParallel


class LateTP(TensorParallel):
    """Comes after FSDP2 instead of before it."""

    @hookimpl
    def parallelize(self, job: Any) -> Transform | None:
        transform = super().parallelize(job)
        return transform and replace(transform, phase=Phase.SHARD, after=("data_parallel",))


class ForgetfulTP(TensorParallel):
    """Leaves the gradients of norms, which every rank has from its part of the sequence, unsummed."""

    def _apply(self, part: nn.Module, job: Any) -> Applied:
        from forge_train_plugins._tp import apply as tp

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
