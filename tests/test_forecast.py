"""The forecast against published measurements: the data files, the fit, and the scores. Its errors are no test."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
NAMES = ("published", "rehearsing", "forecasting", "live", "forecast")
GIB = 2**30

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """Import the scripts; their names are free again afterwards."""
    held = {name: sys.modules.pop(name) for name in NAMES if name in sys.modules}
    sys.path.insert(0, str(FOLDER))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    sys.path.remove(str(FOLDER))
    for name in NAMES:
        sys.modules.pop(name, None)
    sys.modules.update(held)


def test_there_are_sixty_rows_with_distinct_names(bench: Any) -> None:
    names = [row.name for row in bench.published.rows()]
    assert len(names) >= 60
    assert len(set(names)) == len(names)


def test_each_source_says_where_it_is(bench: Any) -> None:
    sources = bench.published.sources()
    assert {row.source for row in bench.published.rows()} == set(sources)
    for name, one in sources.items():
        assert one["title"], name
        assert one["memory"] in ("allocated", "reserved"), name
        if "url" in one:
            assert one["url"].startswith("https://"), name
        else:
            assert "/" in one["repository"], name
            assert len(one["commit"]) == 40, name
            assert one["file"], name


def test_the_numbers_of_each_row_agree(bench: Any) -> None:
    for row in bench.published.rows():
        axes = row.dp_replicate * row.dp_shard * row.cp * row.tp * row.pp
        assert axes == row.devices, row.name
        assert row.devices % row.node == 0, row.name
        assert row.global_batch % (row.dp_replicate * row.dp_shard * (row.micro_batch or 1) * row.flushes) == 0, (
            row.name
        )
        assert row.precision in ("bf16", "fp8"), row.name
        assert row.fused in ("yes", "no"), row.name
        assert {row.tokens_per_second, row.step_seconds, row.tflops} != {None}, row.name
        if row.tokens_per_second and row.step_seconds:
            tokens = row.tokens_per_second * row.step_seconds * row.devices
            assert tokens == pytest.approx(row.tokens, rel=0.04), row.name


def test_memory_fits_the_device(bench: Any) -> None:
    most = {"h100": 96, "h200": 141, "b200": 180, "a100": 80}
    for row in bench.published.rows():
        if row.memory_gib is not None:
            assert 10 < row.memory_gib < most[row.device] * 1e9 / GIB + 6, row.name


def test_each_model_is_expressed_or_says_why_not(bench: Any) -> None:
    from forge_train_tools.configuration.setup import resolve

    rows = bench.published.rows()
    assert {row.model for row in rows} <= set(bench.published.models())
    expressed = {
        row.model: row for row in rows if not row.missing and row.model in ("llama2-13b", "deepseekv2-4-layers")
    }
    assert len(expressed) == 2
    assert len([row for row in rows if not row.missing]) >= 60
    for row in expressed.values():
        setup = resolve(row.request, world=row.devices, data=False, measured=False)
        assert setup.config.train.sequence == row.sequence, row.name
        assert setup.config.parallel.tp == row.tp, row.name


def test_rows_that_differ_in_batches_are_in_one_half(bench: Any) -> None:
    rows = [row for row in bench.published.rows() if not row.missing]
    halves = [row.fitted for row in rows]
    assert 0.25 < sum(halves) / len(halves) < 0.75
    twins = [row.fitted for row in rows if "llama3_70b_l12_tp4_pp1_dp2_mbc" in row.name]
    assert len(twins) == 3
    assert len(set(twins)) == 1


def pair(bench: Any, by: Any, at: int) -> Any:
    """A row whose time and memory follow some constants exactly."""
    # Numbers without a common factor, so that every constant matters in some row and none in all alike.
    traffic = (("all_gather", "tp", 8, 8, 0, 9e10 * (at % 5)), ("send", "dp_shard", 8, 8, 0, 7e11 * (at % 2)))
    planned = bench.rehearsing.Planned(
        products=1.0 + at % 3, narrow=0.5, operands=0.1, attention=0.1, memory=0.1, between=0.3 * (at % 4),
        traffic=traffic, stretch=1.0 + 0.1 * (at % 3), peak=(10 + at) * GIB, flops_per_token=1e9,
    )  # fmt: skip
    row = dataclasses.replace(
        bench.published.rows()[0],
        name=str(at),
        source="simumax" if at % 2 else "torchtitan-202412",
        device="a100" if at % 3 else "h100",
        flushes=1,
        precision="bf16",
        fused="yes" if at % 7 else "no",
        step_seconds=1.0,
        memory_gib=1.0,
    )
    made = bench.forecasting.Pair(row, planned)
    exact = dataclasses.replace(row, step_seconds=made.seconds(by), memory_gib=made.memory(by) / GIB)
    return bench.forecasting.Pair(exact, planned)


def test_the_fit_recovers_the_constants_behind_exact_times(bench: Any) -> None:
    true = bench.forecasting.Constants(products=0.62, fused=0.45, network=0.7, allocated=1.07, reserved=1.2)
    some = [pair(bench, true, at) for at in range(60)]
    found = bench.forecasting.fit(some)
    assert bench.forecasting.COUNT <= 5
    for name in ("products", "fused", "network", "allocated", "reserved"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), abs=0.01), name
    assert max(abs(one.time_error(found)) for one in some) < 0.01
    assert max(abs(one.memory_error(found)) for one in some) < 1e-6


TRAFFIC = (("all_gather", "tp", 8, 8, 0, 0.3 * 450e9), ("all_gather", "dp_shard", 8, 8, 0, 10 * 450e9))
"""0.3 seconds that layers wait for, and 10 of data parallelism, on the links of an H100's node."""


def planned(bench: Any) -> Any:
    return bench.rehearsing.Planned(2.0, 0.5, 0.06, 0.297, 0.1, 0.4, TRAFFIC, 1.5, GIB, 1e9)


def test_a_time_counts_each_part_once(bench: Any) -> None:
    by = bench.forecasting.Constants(products=0.5, fused=0.25, network=0.5)
    row = next(row for row in bench.published.rows() if row.source == "automodel")
    row = dataclasses.replace(row, device="h100", sequence=4096, flushes=1, precision="bf16", fused="yes", note="")

    def seconds(**changes: str) -> float:
        made = bench.forecasting.Pair(dataclasses.replace(row, **changes), planned(bench))
        return float(made.seconds(by))

    work = 2.0 / (0.5 * 0.803) + 1.0 + 0.1 + 0.1
    assert seconds() == pytest.approx((work + 0.6) * 1.5 + 20 - work)
    assert seconds(note="async TP") == pytest.approx(work * 1.5 + 20.6 - work)
    eager = work + 0.3
    assert seconds(fused="no") == pytest.approx((eager + 0.6) * 1.5 + 20 - eager)
    narrow = work - 2.0 / (0.5 * 0.803) * 0.5 * (1 - 1 / 1.77) + 7 / 6 * 0.5 * 0.06
    assert seconds(precision="fp8") == pytest.approx((narrow + 0.3) * 1.5 + 20 - narrow)
    assert seconds(precision="fp8", note="rowwise scales") == pytest.approx((narrow + 0.6) * 1.5 + 20 - narrow)


def test_whole_embeddings_are_counted_where_the_source_has_them(bench: Any) -> None:
    known = {row.name: row for row in bench.published.rows()}
    one, two, four = (
        known[f"kempnerforge {name}"] for name in ("02 7b fsdp2 tp1", "06 7b fsdp2 tp2", "03 7b fsdp1 tp2")
    )
    made = [bench.forecasting.Pair(row, planned(bench)).peak - GIB for row in (one, two, four)]
    half = 128256 * 4096 / 2
    assert made == pytest.approx([0, half * 10, half * 14 + 8.03e9])


def test_a_held_down_device_is_slower_in_each_kernel(bench: Any) -> None:
    by = bench.forecasting.Constants(products=0.5, fused=0.25, network=0.5)
    row = next(
        row for row in bench.published.rows() if row.source == "torchtitan-asynctp" and not row.note.endswith("P")
    )
    row = dataclasses.replace(row, sequence=4096, flushes=1, precision="bf16", fused="yes")
    work = (2.0 / (0.5 * 0.803) + 1.0) / (5 / 7) ** (1 / 3) + 0.2 * 3.35 / 2.4
    made = bench.forecasting.Pair(row, planned(bench))
    assert made.seconds(by) == pytest.approx((work + 0.6) * 1.5 + 20 - work)


def test_each_device_of_a_forecast_row_has_rates_with_a_source(bench: Any) -> None:
    known = bench.forecasting.devices()
    assert {row.device for row in bench.published.rows() if not row.missing} <= set(known)
    for one in known.values():
        assert "attention: " in one["source"]
        assert 0 < one["products"] < 1
        assert all(0 < share < 1 for share in one["attention"].values())


def test_rows_that_differ_in_micro_batches_share_a_rehearsal(bench: Any) -> None:
    few, many = (
        next(row for row in bench.published.rows() if row.name.endswith(f"l12_tp1_pp2_dp4_mbc{count}_cef"))
        for count in (8, 32)
    )
    one = planned(bench)
    found = bench.rehearsing.of_rows([few, many], {few.key: one})
    assert found[few.name] is one
    assert found[many.name].products == pytest.approx(8.0)
    assert [size for *_, size in found[many.name].traffic] == pytest.approx([4 * TRAFFIC[0][-1], TRAFFIC[1][-1]])
    assert found[many.name].stretch == pytest.approx(1.125)
    other = dataclasses.replace(many, tp=2, dp_shard=2, name="other")
    assert other.name not in bench.rehearsing.of_rows([few, other], {few.key: one})


def test_the_page_has_each_row_once(bench: Any) -> None:
    every = bench.published.rows()
    true = bench.forecasting.Constants()
    row = next(row for row in every if not row.missing)
    others = [dataclasses.replace(row, source=source) for source in bench.published.sources()]
    made = [dataclasses.replace(pair(bench, true, 1), row=one) for one in others]
    assert {one.row.fitted for one in made} == {True, False}
    text = bench.forecast.page(every, made, true, {"some row": "some reason"})
    assert text.count("| some row | some reason |") == 1
    assert text.count(f"| {row.name} |") == len(made)
    for source in bench.published.sources():
        assert f"`{source}`" in text


def test_kendalls_tau_and_the_loss_of_a_pick(bench: Any) -> None:
    assert bench.live.kendall([1, 2, 3], [10, 20, 30]) == 1
    assert bench.live.kendall([1, 2, 3], [3, 2, 1]) == -1
    assert bench.live.kendall([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(4 / 6)
    assert bench.live.loss_of_pick([1.0, 1.5], [3.0, 2.0]) == pytest.approx(0.5)
    assert bench.live.loss_of_pick([1.0, 1.5], [1.0, 2.0]) == 0
    assert bench.live.COUNT >= 12
    assert len(bench.live.MODELS) == 2
