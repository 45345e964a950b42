"""Measured clusters: the fit of latency and bandwidth, and the file that a plan reads."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from forge_train.base.errors import ConfigError
from forge_train_tools.measuring.cluster_file import ClusterFile
from forge_train_tools.measuring.fitting import SHORTEST, Sample, fit, worst
from forge_train_tools.planning import plan
from forge_train_tools.planning.clusters import KINDS, Rate, cluster, steps

pytestmark = pytest.mark.unit
RATES = {kind: Rate(1e9 * (at + 1), 1e-5 * (at + 2)) for at, kind in enumerate(KINDS)}
SLOW = 10
"""Times that the other level takes."""


def samples(kinds: dict[str, Rate], ranks: tuple[int, ...] = (2, 4)) -> list[Sample]:
    """Times that follow the rates exactly."""
    made = []
    for kind, rate in kinds.items():
        for size in ranks:
            for held in (1 << 12, 1 << 18, 1 << 24):
                one = Sample(kind, size, held, 1.0)
                made.append(dataclasses.replace(one, seconds=rate.seconds(one.sent, one.steps)))
    return made


def found(some: list[Sample], *, local: int = 4, world: int = 4) -> dict[str, Any]:
    return {
        "samples": [dataclasses.asdict(one) for one in some],
        "products": {"fp32": [4e10, 1e11, 8e10], "bf16": [1e11, 1e11, 2e11]},
        "bandwidth": 2e10,
        "launch": 1e-5,
        "hides": False,
        "memory": 16e9,
        "local": local,
        "world": world,
        "device": "CPU, 2 cores",
        "backend": "gloo",
    }


PRODUCTS = {(64, 8, 8): 3, (64, 16, 8): 1}


def test_steps_are_those_of_a_ring() -> None:
    assert [steps(kind, 4) for kind in KINDS] == [6, 3, 3, 3, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_fit_recovers_the_rate_behind_exact_times(kind: str) -> None:
    some = samples({kind: RATES[kind]})
    made = fit(some)
    assert made.bandwidth == pytest.approx(RATES[kind].bandwidth)
    assert made.latency == pytest.approx(RATES[kind].latency)
    assert worst(some, made) < 1e-9


def test_a_fit_weighs_small_and_large_messages_alike() -> None:
    """A microsecond more matters to a small message and is nothing to a large one."""
    late = [
        dataclasses.replace(one, seconds=one.seconds * (1.5 if one.held < 1 << 20 else 1.0)) for one in samples(RATES)
    ]
    assert worst(late, fit(late)) < worst(late, Rate(1e9, 1e-5))


def test_a_fit_gives_positive_numbers_where_one_part_is_lost() -> None:
    no_latency = [Sample("send", 2, held, held / 1e9) for held in (1 << 10, 1 << 20)]
    assert fit(no_latency).latency == pytest.approx(SHORTEST)
    assert fit(no_latency).bandwidth == pytest.approx(1e9)
    all_latency = [Sample("send", 2, held, seconds) for held, seconds in ((1 << 10, 2e-3), (1 << 20, 1e-3))]
    assert fit(all_latency).bandwidth == pytest.approx((1 << 20) / 1e-3)
    assert fit(all_latency).latency > 0


def test_messages_of_one_size_are_refused() -> None:
    with pytest.raises(ConfigError, match="two sizes"):
        fit([Sample("send", 2, 1024, 1e-3)] * 3)


def test_the_file_read_back_gives_the_measured_times(tmp_path: Path) -> None:
    file = tmp_path / "here.toml"
    file.write_text(ClusterFile(found(samples(RATES)), PRODUCTS).text("fp32", "mine"), encoding="utf-8")
    made = cluster(str(file))
    assert [link.level for link in made.links] == ["node"]
    assert set(made.links[0].measured) == set(KINDS)
    for one in samples(RATES):
        assert made.link(one.ranks).seconds(one.kind, one.sent, one.ranks, 1) == pytest.approx(one.seconds, rel=1e-3)
    assert made.peak == pytest.approx({"fp32": 1e11, "bf16": 2e11})
    work = 3 * 64 * 8 * 8 + 64 * 16 * 8
    seconds = 3 * 64 * 8 * 8 / 4e10 + 64 * 16 * 8 / 1e11
    assert made.efficiency == pytest.approx(work / seconds / 1e11, rel=1e-3)
    numbers = {"devices", "memory", "bandwidth", "efficiency", "launch", "hides", "peak"}
    links = {f"links.node.{key}" for key in ("bandwidth", "latency", "measured")}
    assert set(made.sources) == numbers | links
    assert all("measured 20" in made.sources[key] for key in ("bandwidth", "efficiency", "peak", *links))


def test_two_levels_are_fitted_apart(tmp_path: Path) -> None:
    slow = {kind: Rate(rate.bandwidth / SLOW, rate.latency * SLOW) for kind, rate in RATES.items()}
    some = samples(RATES, (2, 4)) + samples(slow, (8,))
    file = tmp_path / "here.toml"
    file.write_text(ClusterFile(found(some, local=4, world=8), PRODUCTS).text("fp32", "mine"), encoding="utf-8")
    made = cluster(str(file))
    assert [(link.level, link.ranks) for link in made.links] == [("node", 4), ("cluster", 0)]
    for one in some:
        assert made.link(one.ranks).seconds(one.kind, one.sent, one.ranks, 1) == pytest.approx(one.seconds, rel=1e-3)


def test_a_kind_that_was_not_measured_has_the_rate_of_the_link(tmp_path: Path) -> None:
    text = ClusterFile(found(samples({"send": RATES["send"]})), PRODUCTS).text("fp32", "mine")
    (tmp_path / "here.toml").write_text(text, encoding="utf-8")
    link = cluster(str(tmp_path / "here.toml")).links[0]
    assert link.seconds("all_reduce", 1e6, 4, 2) == pytest.approx(1e6 / link.bandwidth + 12 * link.latency)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[links.measured.send]", "[links.measured.sent]", "there is no collective 'sent'. Did you mean 'send'?"),
        ("[links.measured.send]\nbandwidth", "[links.measured.send]\nwidth", "measured.send: bandwidth is missing"),
        ("[links.measured.send]\n", "[links.measured]\nsend = 3\n[sources]\n", "measured.send must be a table"),
    ],
)
def test_a_hole_in_the_measured_part_is_one_sentence(tmp_path: Path, old: str, new: str, words: str) -> None:
    text = ClusterFile(found(samples({"send": RATES["send"]})), PRODUCTS).text("fp32", "mine")
    assert old in text
    (tmp_path / "here.toml").write_text(text.split("[sources]")[0].replace(old, new), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        cluster(str(tmp_path / "here.toml"))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_plan_reads_the_file_as_it_reads_a_device(tmp_path: Path) -> None:
    from forge_train_tools.configuration.request import Request
    from forge_train_tools.configuration.setup import resolve

    file = tmp_path / "here.toml"
    file.write_text(ClusterFile(found(samples(RATES)), PRODUCTS).text("fp32", "mine"), encoding="utf-8")
    small = ("decoder.dim=16", "decoder.layers=1", "train.global_batch=2", "train.sequence=32", "train.micro_batch=1")
    setup = resolve(Request(config="ddp", set=small), world=2, data=False, measured=False)
    roof = plan(setup, world=2, device=str(file)).roofline
    assert roof is not None
    assert (roof.device, roof.memory_bytes) == ("CPU, 2 cores, measured", 16e9)
    with pytest.raises(ConfigError, match=r"nowhere.toml: the cluster file can't be read"):
        plan(setup, world=2, device="nowhere.toml")


def test_a_search_takes_the_rate_of_each_kind(tmp_path: Path) -> None:
    from forge_train_tools.searching.candidates import Candidate
    from forge_train_tools.searching.forms import Memory, Sent
    from forge_train_tools.searching.speed import speed
    from forge_train_tools.searching.variants import Variant

    file = tmp_path / "here.toml"
    file.write_text(ClusterFile(found(samples(RATES)), PRODUCTS).text("fp32", "mine"), encoding="utf-8")
    one = Candidate(1, 1, 1, 1, 2, 1, 1, 1, 1, Variant(()))
    sent = [Sent("reduce_scatter", "tp", 2, 3.0, 3e6)]
    took = speed(one, cluster(str(file)), "fp32", 1e9, {}, 0.0, 0.0, sent, Memory(1.0, 1.0, 1.0), None)
    rate = RATES["reduce_scatter"]
    assert took.blocking == pytest.approx(1.5e6 / rate.bandwidth + 3 * rate.latency, rel=1e-3)
