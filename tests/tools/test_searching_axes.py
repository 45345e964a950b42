"""The search for a layout: experts that axes spread, and modules with a peak of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from forge_train_tools.planning import plan
from forge_train_tools.planning.clusters import cluster
from forge_train_tools.searching.search import chosen, setup_of
from forge_train_tools.searching.space import Space
from searched import request

SHORT = ("decoder.layers=2", "decoder.kv_heads=2", "train.micro_batch=2", "fsdp2.reduce=last")


@pytest.mark.slow
def test_experts_are_counted_where_axes_spread_them() -> None:
    sizes = ("parallel.dp_shard=2", "parallel.tp=2", "parallel.ep=2", "parallel.etp=2")
    given = request(
        *SHORT, "moe.experts=4", *sizes, "parallel.pp=1", "parallel.cp=1", "parallel.dp_replicate=1",
        plugins=("moe", "fsdp2"), without=("cp", "ac", "pp"),
    )  # fmt: skip
    space = Space(given, 4, cluster("h100"))
    (one,) = space.candidates()
    made = plan(setup_of(chosen(space.request, one), 4), world=4, device="h100")
    weights = space.forms.weights(one.tp, one.ep, one.etp)
    shards = (one.shards, one.expert_shards)
    assert sum(entry.sharded(*shards) for entry in weights.entries) == pytest.approx(made.memory.parameters, rel=0.01)
    told = {(sent.kind, sent.axes): sent.bytes for sent in space.forms.sent(one)}
    for found in made.communication:
        if found.axis in ("tp", "ep") and found.kind != "all_reduce":
            assert told[found.kind, found.axis] == pytest.approx(found.bytes, rel=0.01)
    assert ("all_to_all", "ep") in told


@pytest.mark.slow
@pytest.mark.unit
def test_converted_layers_multiply_at_their_own_peak() -> None:
    given = request(*SHORT, plugins=("fp8", "fsdp2"), without=("cp", "ac", "pp", "tp", "ep"))
    space = Space(given, 1, cluster("h100"))
    one = next(space.candidates())
    with space.composer.composed(one.variant, {}) as short:
        narrow = sum(
            module.weight.numel()
            for name, module in short.named_modules()
            if isinstance(module, nn.Linear) and name != "head"
        )
    tokens = one.micro_batch * space.config.train.sequence
    eighth = space.forms.flops(one, "flops fp8")
    assert eighth == 6 * space.composer.repetitions * narrow * tokens
    memory = space.forms.memory(one)
    fast = space.found(one, memory).speed.compute
    wide = replace(space.cluster, peak={**space.cluster.peak, "fp8": space.cluster.peak["bf16"]})
    space.cluster = wide
    slow = space.found(one, memory).speed.compute
    passes = one.accumulation / wide.efficiency
    assert slow - fast == pytest.approx(
        passes * eighth * (1 / wide.peak["bf16"] - 1 / cluster("h100").peak["fp8"]), rel=1e-6
    )


@pytest.mark.unit
def test_a_device_without_the_peak_is_named() -> None:
    given = request(*SHORT, plugins=("fp8", "fsdp2"), without=("cp", "ac", "pp", "tp", "ep"))
    space = Space(given, 1, cluster("a100"))
    assert list(space.points.notes) == ["A100 SXM 80 GB has no peak for fp8: its modules count at that of bf16"]
