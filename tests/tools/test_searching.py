"""The search for a layout: its closed forms and verdicts agree with compositions and rehearsals."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from forge_train.base.errors import ConfigError
from forge_train.mesh.layout import Layout
from forge_train.mesh.world import World
from forge_train_kit.pipeline.cuts import Cost
from forge_train_tools.planning import plan
from forge_train_tools.planning.clusters import Cluster, Link, cluster
from forge_train_tools.planning.on_cuda import kernels_of_cuda
from forge_train_tools.planning.stages import look_at_stages
from forge_train_tools.searching.candidates import Candidate, layouts, micro_batches
from forge_train_tools.searching.forms import Memory, Sent
from forge_train_tools.searching.schedules import Schedule, fullest
from forge_train_tools.searching.search import chosen, nothing_fits, rank, search, setup_of
from forge_train_tools.searching.space import Space
from forge_train_tools.searching.speed import Speed, speed
from forge_train_tools.searching.stages import Cut
from forge_train_tools.searching.variants import Variant
from searched import composes, every_candidate, request, verdict

FEW = request(
    "fsdp2.reduce=last", "decoder.kv_heads=2", "pp.schedule=1f1b", plugins=("fsdp2", "pp"), without=("cp", "ep", "ac")
)
"""With little to choose from: pipelines, tensor parallelism and sharding."""


@pytest.fixture(scope="module")
def space() -> Space:
    return Space(FEW, 4, cluster("h100"))


@pytest.mark.unit
def test_layouts_tile_the_world() -> None:
    allowed = {"pp": [1, 2], "tp": [1, 2, 3], "cp": [1], "dp_replicate": [1, 2, 3], "dp_shard": [1, 2, 3, 6]}
    found = [tuple(one.values())[:5] for one in layouts(6, allowed, [(1, 1)])]
    order = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    assert sorted(found) == sorted(one for one in product(*(allowed[axis] for axis in order)) if math.prod(one) == 6)


@pytest.mark.unit
def test_micro_batches_divide_the_share() -> None:
    assert micro_batches(24, 0) == [1, 2, 4, 8]
    assert (micro_batches(24, 3), micro_batches(24, 5)) == ([3], [])


def _disagreements(space: Space, some: Sequence[Candidate]) -> list[str]:
    found = []
    for one in some:
        said, truth = verdict(space, one), composes(space, one)
        if bool(said) != bool(truth):
            found.append(f"{one}: {said or 'legal'!r}, and the composition: {truth or 'legal'!r}")
    return found


@pytest.mark.slow
@pytest.mark.unit
def test_verdicts_agree_with_the_composition(space: Space) -> None:
    some = random.Random(1).sample(every_candidate(Space(FEW, 4, cluster("h100"))), 8)
    assert _disagreements(space, some) == []


@pytest.mark.extended
@pytest.mark.parametrize(("world", "more"), [(4, ()), (6, ()), (8, ()), (8, ("moe",)), (12, ())])
def test_verdicts_agree_on_hundreds_of_layouts(world: int, more: tuple[str, ...]) -> None:
    given = request(*(("moe.experts=4",) if more else ()), plugins=more)
    space = Space(given, world, cluster("h100"))
    every = every_candidate(space)
    assert _disagreements(space, random.Random(world).sample(every, min(80, len(every)))) == []


@pytest.mark.slow
def test_memory_agrees_with_the_rehearsal(space: Space) -> None:
    errors = []
    for one in space.candidates():
        if (one.micro_batch, one.accumulation, one.dp_replicate) != (2, 6, 1) or space.legality.verdict(one):
            continue
        made = plan(setup_of(chosen(space.request, one), 4), world=4, device="h100")
        assert made.memory.peak is not None
        assert space.forms.memory(one).parameters == pytest.approx(made.memory.parameters, rel=0.01)
        errors.append(abs(space.forms.memory(one).peak / made.memory.peak - 1))
        assert made.roofline is not None
        moved = space.forms.between(one) / space.cluster.bandwidth
        assert moved == pytest.approx(made.roofline.fusible, rel=0.2)  # bytes at the ends of so short a model count
    assert len(errors) == 2  # pipelines and tensor parallelism, with sharding
    assert max(errors) < 0.1


@pytest.mark.slow
def test_kernels_are_as_many_as_in_a_rehearsal(space: Space) -> None:
    (one,) = (
        one
        for one in space.candidates()
        if (one.shards, one.dp_replicate, one.micro_batch, one.accumulation) == (4, 1, 2, 3)
    )
    whole = space.composer.rehearse(one.variant, {"dp_shard": 4}, micro_batch=2, accumulation=3)
    assert space.forms.kernels(one) == pytest.approx(whole.of("kernels", space.composer.repetitions), rel=0.05)


@pytest.mark.slow
def test_an_input_gradient_that_is_computed_twice_counts_twice() -> None:
    """Units that are recomputed have a whole backward pass for their weights, after one for the input gradient."""
    settings = ("fsdp2.reduce=last", "ac.mode=full", "train.micro_batch=2")
    given = request(*settings, plugins=("fsdp2", "pp", "ac"), without=("cp", "ep", "tp"))
    space = Space(given, 2, cluster("h100"))
    (one,) = (one for one in space.candidates() if one.pp == 2 and "pp.schedule=zbv" in one.variant.of("pp").settings)
    setup = setup_of(chosen(space.request, one), 2)
    layout, place = Layout.of(setup.config.parallel, 2), World(size=2, local_size=2)
    with kernels_of_cuda():
        looks = look_at_stages(setup, layout, place, Path("runs/plan"), alternatives=False)
    kernels = [look.rehearsed.kernels for look in looks]
    moved = max(sum(one.bytes * count for one, count in some.items() if one.fusible) for some in kernels)
    flops = max(look.kernel_flops for look in looks)
    assert space.forms.flops(one) * one.accumulation == pytest.approx(flops, rel=0.01)
    assert space.forms.between(one) == pytest.approx(moved, rel=0.1)
    assert space.forms.kernels(one) == pytest.approx(max(some.total() for some in kernels), rel=0.1)


@pytest.mark.unit
def test_parts_of_a_rank_are_at_their_fullest_at_different_moments() -> None:
    """What a rank keeps at once is less than the most of each part."""
    moments = [{0: 1, 3: 0}, {0: 3, 3: 0}, {0: 1, 3: 1}, {0: 1, 3: 2}]
    schedule = Schedule(1.0, (0, 1, 1, 0), (fullest(moments), ((1, 1),)), ((0.0, 0.0), (0.0, 0.0)), (1, 1))
    assert schedule.in_flight[0] == ((1, 2), (3, 0))
    cut = Cut([Cost(1.0, 1)] * 4, [1.0] * 4)
    assert cut.holdings(schedule)[0].flying == 3


@pytest.mark.unit
def test_a_cpu_hides_neither_collectives_nor_launches() -> None:
    one = Candidate(1, 1, 2, 1, 1, 1, 1, 1, 1, Variant(()))
    sent = [Sent("all_gather", "dp_shard", 2, 1.0, 2e9)]

    def step(**known: Any) -> Speed:
        link = Link("node", 1e9, 1e-9)
        made = Cluster("mine", 2, 1e9, 1e9, 1.0, {"fp32": 1e9}, (link,), launch=1e-3, **known)
        return speed(one, made, "fp32", 2e9, {}, 1e9, 2500.0, sent, Memory(0.0, 0.0, 0.0), None)

    beside, alone = step(), step(hides=False)
    assert (beside.compute, beside.between, beside.exposed) == pytest.approx((2.0, 1.0, 0.0))
    assert (alone.compute, alone.between, alone.exposed) == pytest.approx((2.0, 3.5, 1.0))


@pytest.mark.unit
def test_a_search_ranks_what_fits_and_counts_the_rest() -> None:
    given = request(
        "fsdp2.reduce=last", "train.micro_batch=1", plugins=("fsdp2",), without=("cp", "ep", "ac", "pp", "tp")
    )
    made = search(given, world=2, cluster=cluster("h100"))
    rates = [one.tokens_per_second for one in made.ranked]
    assert {str(one.candidate).split(",")[0] for one in made.ranked} == {"dp_shard 2", "dp_replicate 2"}
    assert rates == sorted(rates, reverse=True)
    assert made.front[0] is made.ranked[0]
    assert [one.memory.peak for one in made.front] == sorted((one.memory.peak for one in made.front), reverse=True)


@pytest.mark.unit
def test_memory_that_lacks_is_named_with_more_ranks_that_fit(space: Space) -> None:
    alone = space.of(1)
    least = min(alone.forms.memory(one).peak for one in alone.candidates())
    alone.cluster = replace(alone.cluster, memory=least - 1)
    made = rank(alone)
    assert (made.ranked, made.fitting) == ([], 2)
    assert made.nearest is not None
    assert made.nearest.peak == least
    with pytest.raises(
        ConfigError, match=r"No layout of 1 ranks fits into H100 .*: the nearest, .* 2 ranks have a lay"
    ):
        raise nothing_fits(made)
    alone.cluster = replace(alone.cluster, memory=1.0)
    with pytest.raises(ConfigError, match=r" are missing, and more ranks do not help\."):
        raise nothing_fits(rank(alone))


@pytest.mark.unit
def test_a_world_without_layouts_is_named_with_the_nearest_that_has_one(space: Space) -> None:
    made = rank(space.of(23))
    assert (made.ranked, made.nearest, made.fitting) == ([], None, 24)
    with pytest.raises(ConfigError, match=r"No layout of 23 ranks .*: train\.global_batch .* ranks that fits is 24\."):
        raise nothing_fits(made)
    made.refused.update({"train.sequence: … tokens are no multiple of … × parallel.cp": 10**6})
    assert "…" not in str(nothing_fits(made)), "numbers that are left out explain nothing"
