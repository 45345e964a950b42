"""`forge trace` on ranks: bytes by formula, the same numbers as without it, and who is waited for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import trace_cases
from forge_train_tools.testing import Pool
from forge_train_tools.tracing import Trace
from forge_train_tools.tracing.analysis import Analysis
from forge_train_tools.tracing.record import Call

pytestmark = [pytest.mark.dist]

WORLD, LAYERS, DIM, SEQUENCE, MICRO, FP32 = 2, 2, 32, 32, 2, 4
HIDDEN = MICRO * SEQUENCE * DIM * FP32
"""Bytes of a micro-batch's hidden states; as in the preset `tiny`."""
MEASURES = 5
"""What a layer of experts counts besides their tokens."""
EXPERTS = {"moe.experts": 4, "moe.hidden": 16, "moe.shared": 1, "moe.top_k": 2}


def traced(ranks: Pool, folder: Path, plugins: tuple[str, ...], config: Mapping[str, Any]) -> tuple[Any, Trace]:
    """A traced run, whose numbers are those of plain steps and of `forge train`, bit for bit."""
    found = ranks.run(trace_cases.take, WORLD, folder=str(folder), plugins=plugins, config=config)
    for one in found:
        assert one["traced"] == one["plain"]
        assert one["traced"]["losses"] == one["trained"]
    return found, Trace.read(folder, trace_cases.TRACED, WORLD, "cpu")


def of(trace: Trace, rank: int, kind: str, plugin: str, phase: str = "") -> list[Call]:
    calls = trace.ranks[rank].calls
    return [one for one in calls if (one.kind, one.plugin) == (kind, plugin) and phase in (one.phase, "")]


def gathered(shapes: Mapping[str, list[int]]) -> int:
    """Bytes of parameters whose rows are divided: each rank's share is as long as the longest."""
    return sum(math.ceil(rows / WORLD) * WORLD * math.prod(rest) * FP32 for rows, *rest in shapes.values())


def test_sharded_weights(ranks: Pool, tmp_path: Path) -> None:
    found, trace = traced(ranks, tmp_path, ("fsdp2",), {})
    shapes = found[0]["shapes"]
    kept = {name: shape for name, shape in shapes.items() if name.split(".")[0] in ("norm", "head")}
    for rank in range(WORLD):
        forward, backward = (of(trace, rank, "all_gather", "fsdp2", phase) for phase in ("forward", "backward"))
        assert sum(one.bytes for one in forward) == gathered(shapes)
        assert sum(one.bytes for one in backward) == gathered(shapes) - gathered(kept)
        reduced = of(trace, rank, "reduce_scatter", "fsdp2")
        assert sum(one.bytes for one in reduced) == gathered(shapes)
        assert sum(one.sent for one in reduced) == gathered(shapes) * (WORLD - 1) / WORLD
        assert {one.axis for one in forward + backward + reduced} == {"dp_shard"}
        assert {one.module for one in forward} >= {"embedding", *(f"layers.{at}" for at in range(LAYERS)), "head"}
        assert all(one.waits for one in forward + backward + reduced)


def test_sequence_parallelism(ranks: Pool, tmp_path: Path) -> None:
    _, trace = traced(ranks, tmp_path, ("tp",), {"parallel.tp": 2})
    micro_batches = 4 // MICRO
    for rank in range(WORLD):
        for kind in ("all_gather", "reduce_scatter"):
            for phase in ("forward", "backward"):
                calls = of(trace, rank, kind, "tp", phase)
                # Attention and feed-forward of each layer, and the border of the embedding and of the head.
                assert len(calls) == micro_batches * (2 * LAYERS + 1)
                assert {one.bytes for one in calls} == {HIDDEN}
                assert "_tp/collectives.py:" in calls[0].places[0]
        inside = [one.module for one in of(trace, rank, "all_gather", "tp", "forward")]
        assert inside.count("layers.0.attention") == inside.count("layers.1.feed_forward") == micro_batches


def test_experts(ranks: Pool, tmp_path: Path) -> None:
    _, trace = traced(ranks, tmp_path, ("moe", "ep"), {"parallel.ep": 2, "moe.bias_speed": 0.001, **EXPERTS})
    pairs = zip(*([one for one in rank.calls if one.kind == "all_to_all"] for rank in trace.ranks), strict=True)
    rows = [pair for pair in pairs if pair[0].dtype == "float32" and len(pair[0].shape) == 2]
    # There and back, in both passes. A rank sends all its rows; what it receives depends on the router, but the ranks
    # receive together what they sent.
    assert len(rows) == 4 * LAYERS
    assert all(min(one.bytes for one in pair) == HIDDEN * EXPERTS["moe.top_k"] for pair in rows)
    # On two ranks the group of the experts is that of the shards, and has its name.
    assert {(one.axis, one.plugin) for pair in rows for one in pair} == {("dp_shard", "alltoall")}
    (loads,) = (one for one in of(trace, 0, "all_reduce", "moe", "update"))
    assert loads.shape == [LAYERS, EXPERTS["moe.experts"] + MEASURES]


def test_slices_of_the_sequence(ranks: Pool, tmp_path: Path) -> None:
    """Weights are sharded over cp too, by another plugin than the one that splits the sequence."""
    found, trace = traced(ranks, tmp_path, ("cp",), {"parallel.cp": 2})
    for rank in range(WORLD):
        assert sum(one.bytes for one in of(trace, rank, "reduce_scatter", "fsdp2")) == gathered(found[0]["shapes"])
        keys_and_values = of(trace, rank, "all_gather", "cp", "forward")
        assert [one.bytes for one in keys_and_values if one.dtype == "float32"] == [HIDDEN] * (4 // MICRO * LAYERS)
        assert {one.axis for one in trace.ranks[rank].calls} == {"cp"}


def test_whole_matrices_for_the_optimizer(ranks: Pool, tmp_path: Path) -> None:
    """Shards of hidden matrices go to the rank that orthogonalises them, and back, in bf16."""
    found, trace = traced(ranks, tmp_path, ("fsdp2", "muon"), {})
    hidden = [math.prod(shape) for shape in found[0]["shapes"].values() if len(shape) == 2]
    tables = sum(math.prod(found[0]["shapes"][f"{name}.weight"]) for name in ("embedding", "head"))
    for rank in range(WORLD):
        calls = of(trace, rank, "all_to_all", "muon", "update")
        assert sum(one.bytes for one in calls) == 2 * 2 * (sum(hidden) - tables) // WORLD


def test_stages(ranks: Pool, tmp_path: Path) -> None:
    _, trace = traced(ranks, tmp_path, ("pp",), {"parallel.pp": 2})
    micro_batches = 4 // MICRO
    sent = [of(trace, rank, "send", "pp") for rank in range(WORLD)]
    received = [of(trace, rank, "recv", "pp") for rank in range(WORLD)]
    for calls in (*sent, *received):
        assert [one.bytes for one in calls if one.shape[-1:] == [DIM]] == [HIDDEN] * micro_batches
    assert {tuple(one.ranks) for one in sent[0]} == {(0, 1)}
    assert [{one.phase for one in calls} for calls in sent] == [{"forward"}, {"backward"}]
    assert {one.key: one.bytes for one in sent[0]} == {one.key: one.bytes for one in received[1]}
    assert {one.key: one.bytes for one in sent[1]} == {one.key: one.bytes for one in received[0]}


def test_a_rank_that_sleeps(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(trace_cases.take, WORLD, folder=str(tmp_path), plugins=("fsdp2",), config={}, sleeps=True)
    found = Analysis(Trace.read(tmp_path, trace_cases.TRACED, WORLD, "cpu"))
    worst = found.told[0]
    assert (worst.rank, worst.behind, worst.module, worst.phase) == (1, 0, trace_cases.SLOW, "forward")
    assert found.shares[1].waiting > found.shares[1].compute
    assert max(found.path, key=lambda one: one.end - one.start).rank == 0
