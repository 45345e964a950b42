"""`forge plan --check-collectives`: planted faults are named with ranks, part of the step and line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forge_train import Applied, Job, Phase, Plugin, Transform, hookimpl
from forge_train.mesh.layout import Layout
from forge_train_tools.ordering import Checked, check_collectives
from forge_train_tools.ordering.agreement import Agreement, Fault
from forge_train_tools.ordering.classes import Classes, Places, RankClass, cover, words
from forge_train_tools.ordering.record import Called, Group
from forge_train_tools.testing.runs import prepared

pytestmark = [pytest.mark.unit]

# -- sequences compared -----------------------------------------------------------------------------------------------

TP, DP, PP = Group("dense", ("tp",)), Group("dense", ("dp_shard",)), Group("dense", ("pp",))
SUM = Called("all_reduce", TP, (4,), "float32", "sum", part="forward", place="a.py:1, in f", plugin="a")
OTHER = Called("all_gather", TP, (8,), "float32", part="backward", place="b.py:2, in g", plugin="b")


def faults(layout: Layout, calls: Callable[[Mapping[str, Any]], list[Called]]) -> list[Fault]:
    """The faults where each rank calls what a function of its labels says."""
    places = Places(layout)
    names = list(places.sizes)
    found: dict[tuple[Any, ...], RankClass] = {}
    for rank in range(layout.world):
        labels = places.labels(rank, names)
        found[tuple(labels.values())] = RankClass(labels, 1, rank, tuple(calls(labels)))
    return Agreement(places, list(found.values())).faults()


ON_FIRST: dict[str, tuple[list[Called], list[Called], str]] = {
    "skipped": ([OTHER], [SUM, OTHER], "tp 1: all_reduce (sum) of float32 [4] along tp; tp 0 skips it."),
    "order": ([OTHER, SUM], [SUM, OTHER], "tp 0: all_gather of float32 [8] along tp, then all_reduce"),
    "shape": ([replace(SUM, shape=(5,))], [SUM], "float32 [5]"),
    "dtype": ([replace(SUM, dtype="bfloat16")], [SUM], "bfloat16 [4]"),
    "reduction": ([replace(SUM, op="max")], [SUM], "all_reduce (max)"),
    "root": ([replace(OTHER, root=1)], [replace(OTHER, root=0)], "from place 1"),
    "call": ([replace(OTHER, kind="barrier")], [SUM], "barrier"),
    "group": ([replace(SUM, group=DP)], [SUM], "along dp_shard"),
}


@pytest.mark.parametrize("kind", ON_FIRST)
def test_a_class_that_calls_otherwise(kind: str) -> None:
    first, others, message = ON_FIRST[kind]
    (fault,) = faults(Layout(tp=2), lambda at: first if at["tp"] == 0 else others)
    assert fault.kind == kind
    assert message in fault.message
    assert {one.ranks for one in fault.sides} == {"tp 0", "tp 1"}


def test_equal_calls_are_no_fault() -> None:
    assert faults(Layout(tp=4, dp_shard=2), lambda _: [SUM, replace(SUM, group=DP), OTHER]) == []


def test_two_orders_of_two_groups() -> None:
    """Four ranks in a circle: each waits for a neighbour, along another axis than the one before."""
    both = [SUM, replace(SUM, group=DP)]
    (fault,) = faults(Layout(tp=2, dp_shard=2), lambda at: both if at["tp"] == at["dp_shard"] else both[::-1])
    assert fault.kind == "deadlock"
    assert len(fault.sides) == 4
    # Along one axis only, the pairs of the other axis agree among themselves, and nobody waits for ever.
    assert faults(Layout(tp=2, dp_shard=2), lambda at: both if at["tp"] else both[::-1]) == []


def message(kind: str, steps: int, **more: Any) -> Called:
    return Called(kind, PP, **{"shape": (2,), "dtype": "float32", "peer": (("pp", steps),), **more})


def wait(number: int) -> Called:
    return Called("wait", Group("", ()), message=number)


def test_messages() -> None:
    there, back = message("send", 1), message("recv", 1)
    two = Layout(pp=2)
    assert faults(two, lambda at: [there, wait(0)] if at["pp"] == 0 else [back, wait(0)]) == []
    (size,) = faults(two, lambda at: [there] if at["pp"] == 0 else [replace(back, shape=(3,))])
    (lost,) = faults(two, lambda at: [there, there] if at["pp"] == 0 else [back, wait(0)])
    assert (size.kind, lost.kind) == ("message", "message")
    assert "Message 1 from stage 0 to stage 1" in size.message
    assert "Message 2 from stage 0 to stage 1" in lost.message


def test_stages_that_wait_before_they_send() -> None:
    """Both receive first; in another order of the same calls, they do not wait for each other."""
    receive_first = [message("recv", 1), wait(0), message("send", 1), wait(1)]
    (fault,) = faults(Layout(pp=2), lambda _: receive_first)
    assert (fault.kind, [one.call for one in fault.sides]) == ("deadlock", ["wait along ", "wait along "])
    send_first = [message("send", 1), message("recv", 1), wait(1), wait(0)]
    assert faults(Layout(pp=2), lambda _: send_first) == []


# -- classes ----------------------------------------------------------------------------------------------------------


def test_each_two_labels_are_seen_together() -> None:
    places = Places(Layout(pp=4, dp_shard=5, cp=4, tp=8))
    every: dict[tuple[Any, ...], int] = {}
    for rank in range(640):
        every.setdefault(tuple(places.labels(rank).values()), rank)
    chosen = cover(every)

    def pairs(rows: Any) -> set[Any]:
        return {(i, row[i], j, row[j]) for row in rows for i in range(4) for j in range(i)}

    assert pairs(chosen) == pairs(every)
    assert len(chosen) <= 20 < len(every)


@pytest.mark.parametrize(
    ("differs", "names"),
    [
        (lambda at: 0, {"every rank"}),
        (lambda at: at["tp"] == 0, {"first along tp", "between the first and the last along tp", "last along tp"}),
        (lambda at: (at["tp"], at["dp_shard"]) == (0, 4), None),
        (lambda at: (at["tp"], at["dp_shard"], at["cp"]) == (0, 0, 0), None),
    ],
)
def test_axes_that_tell_what_a_rank_calls(differs: Callable[[Mapping[str, int]], int], names: set[str] | None) -> None:
    places = Places(Layout(dp_shard=5, cp=4, tp=8))

    def calls(rank: int) -> list[Called]:
        return [SUM] * (1 + differs(places.of(rank)))

    classes = Classes(places, calls)
    found = classes.found()
    assert sum(one.ranks for one in found) == 160
    for rank in range(160):
        labels = places.labels(rank)
        own = next(one for one in found if all(labels[axis] == label for axis, label in one.labels.items()))
        assert list(own.calls) == calls(rank)
    if names is not None:
        assert {words(one.labels) for one in found} == names
        assert len(classes.known) <= 15


def test_experts_have_places_of_their_own() -> None:
    places = Places(Layout(dp_shard=4, tp=2, ep=4))
    assert places.labels(5) == {"dp_shard": "between", "tp": "last", "efsdp": "last", "ep": "between"}
    group = Group("expert", ("ep",))
    assert all(set(places.members(rank, group)) == {rank // 4 * 4 + at for at in range(4)} for rank in range(8))
    assert places.peer(7, (("dp_shard", 1), ("tp", 1))) == 0


# -- a whole run ------------------------------------------------------------------------------------------------------


def line_of(function: Callable[..., Any], text: str) -> int:
    """Number of the line of a function that has a text."""
    lines, first = inspect.getsourcelines(function)
    return first + next(at for at, line in enumerate(lines) if text in line)


def checked(
    monkeypatch: pytest.MonkeyPatch, folder: Path, world: int, plugins: Any, config: Mapping[str, Any]
) -> Checked:
    """The check of a small model."""
    launched = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    for variable, value in {**launched, "MASTER_ADDR": "here", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(variable, str(value))
    with prepared(plugins, config, folder=folder) as setup:
        return check_collectives(setup, world=world, folder=folder / "none")


ONE = {"decoder.layers": 1}


def at(job: Job, axis: str) -> int:
    return job.dist.mesh("dense", axis).get_local_rank()


class Careless(Plugin):
    """Every part of a step does one thing that depends on the rank."""

    api = (1, 0)

    @hookimpl
    def parallelize(self, job: Job) -> Transform:
        def forward(module: nn.Module, args: Any, out: Any) -> None:
            if at(job, "tp") == 0:
                job.dist.all_reduce(torch.zeros(4), axis="tp")  # skipped
            out.register_hook(backward)

        def backward(gradient: Tensor) -> None:
            job.dist.all_reduce(torch.zeros(4 + at(job, "dp_shard")), axis="dp_shard")  # shape

        def apply(part: nn.Module) -> Applied:
            part.get_submodule(part.units[0]).register_forward_hook(forward)  # type: ignore[index]
            return Applied(part, (part.units[0],))  # type: ignore[index]

        return Transform(Phase.RECOMPUTE, "careless", apply)

    @hookimpl
    def around(self, span: str, job: Job) -> Any:
        @contextmanager
        def update() -> Iterator[None]:
            dtype = torch.float64 if at(job, "dp_shard") else torch.float32
            job.dist.all_reduce(torch.zeros(3, dtype=dtype), axis="data")  # dtype
            yield

        return update if span == "optimizer" else None


@pytest.mark.slow
def test_planted_faults_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = checked(monkeypatch, tmp_path, 4, ("fsdp2", "tp", Careless), {"parallel.tp": 2, **ONE})
    sides = {fault.kind: next(one for one in fault.sides if one.call) for fault in found.faults}
    expected = {"skipped": ("forward", "tp"), "shape": ("backward", "dp_shard"), "dtype": ("optimizer", "dp_shard")}
    assert sides.keys() == expected.keys()
    for kind, (part, axis) in expected.items():
        assert sides[kind].part == part
        assert sides[kind].place.partition(", in")[0].endswith(f"test_ordering.py:{line_of(Careless, f'# {kind}')}")
        assert sides[kind].plugin == "careless"
        assert f"first along {axis}" in sides[kind].ranks
    assert found.notes == ()


class OnOneStage(Plugin):
    """Stages do things of their own, at the borders of a step."""

    api = (1, 0)

    @hookimpl
    def parallelize(self, job: Job) -> Transform:
        def apply(part: nn.Module) -> Applied:
            if at(job, "pp") == 0:
                job.dist.gather_objects("x")  # composition
            return Applied(part, (part.units[0],))  # type: ignore[index]

        return Transform(Phase.RECOMPUTE, "one_stage", apply)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class TwoOrders(Plugin):
    """Some ranks call a group of all first, and others one of two."""

    api = (1, 0)

    @hookimpl
    def parallelize(self, job: Job) -> None:
        self.job = job

    def state_dict(self) -> dict[str, Any]:
        for axis in ("", "tp") if at(self.job, "tp") else ("tp", ""):
            self.job.dist.all_reduce(torch.zeros(2), axis=axis)  # orders
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


@pytest.mark.slow
def test_two_orders_are_a_deadlock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = checked(monkeypatch, tmp_path, 4, ("fsdp2", "tp", TwoOrders), {"parallel.tp": 2, **ONE})
    (fault,) = found.faults
    assert fault.kind == "deadlock"
    assert {one.ranks for one in fault.sides} == {"first along tp", "last along tp"}
    line = f"test_ordering.py:{line_of(TwoOrders, '# orders')}"
    assert all(one.part == "checkpoint" and line in one.place for one in fault.sides)


@pytest.mark.slow
def test_a_stage_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = checked(monkeypatch, tmp_path, 2, ("pp", OnOneStage), {"parallel.pp": 2})
    (fault,) = found.faults
    (side,) = (one for one in fault.sides if one.call)
    assert (fault.kind, side.ranks, side.part) == ("skipped", "stage 0", "composition")
    assert f"test_ordering.py:{line_of(OnOneStage, '# composition')}" in side.place


LAYOUTS: dict[str, tuple[int, tuple[str, ...], dict[str, Any]]] = {
    "hsdp, tp": (16, ("fsdp2", "tp"), {"parallel.tp": 2, "parallel.dp_replicate": 2, "train.global_batch": 16}),
    "ring, tp": (16, ("fsdp2", "tp", "cp", "auto"), {"parallel.tp": 2, "parallel.cp": 4, "train.global_batch": 8}),
    "pp, tp, cp, dp": (
        16,
        ("fsdp2", "pp", "tp", "cp", "auto"),
        {"parallel.pp": 2, "parallel.tp": 2, "parallel.cp": 2, "cp.method": "gather", "train.global_batch": 8},
    ),
    "interleaved": (4, ("pp", "fsdp2"), {"parallel.pp": 2, "pp.schedule": "interleaved_1f1b", "pp.parts": 2,
                                         "decoder.layers": 4, "train.global_batch": 16}),
    "zero bubble": (2, ("pp",), {"parallel.pp": 2, "pp.schedule": "zbv", "decoder.layers": 4}),
    "ddp": (4, ("ddp",), {"train.global_batch": 8}),
    "experts": (8, ("fsdp2", "ep", "moe"), {"parallel.ep": 4, "train.global_batch": 16, "moe.experts": 4}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, layout: str) -> None:
    world, plugins, config = LAYOUTS[layout]
    found = checked(monkeypatch, tmp_path, world, plugins, config)
    assert (found.faults, found.notes) == ((), ())
    assert found.groups
    assert sum(one.ranks for one in found.classes) == world
