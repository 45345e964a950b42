"""Clusters as data files: those that come with Forge, and what is wrong with a user's."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from forge_train.base.errors import ConfigError
from forge_train_tools.planning.clusters import cluster, names

pytestmark = pytest.mark.unit

GOOD = """
name = "Mine"
devices = 4
memory = 24e9
bandwidth = 1e12
efficiency = 0.4

[peak]
bf16 = 100e12

[[links]]
level = "node"
ranks = 4
bandwidth = 25e9
latency = 5e-6

[[links]]
level = "cluster"
bandwidth = 1e9
latency = 50e-6
"""


@pytest.mark.parametrize("name", names())
def test_each_number_of_a_preset_has_a_source(name: str) -> None:
    found = cluster(name)
    given = (one.name for one in dataclasses.fields(found) if getattr(found, one.name) != one.default)
    own = {*given} - {"name", "links", "sources"}
    links = {f"links.{link.level}.{key}" for link in found.links for key in ("bandwidth", "latency")}
    assert set(found.sources) == own | links
    assert all(found.sources.values())


@pytest.mark.parametrize("name", names())
def test_a_source_says_where_it_was_read_or_that_nobody_checked_it(name: str) -> None:
    said = re.compile(r"\bread (at|in) [\w-]+(\.[\w-]+)+/\S|not checked|an assumption")
    assert [key for key, source in cluster(name).sources.items() if not said.search(source)] == []


def test_a_group_of_ranks_uses_the_link_of_its_level(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(GOOD)
    found = cluster(str(file))
    assert [found.link(span).level for span in (2, 4, 8, 3)] == ["node", "node", "cluster", "cluster"]


def test_a_ring_across_nodes_uses_the_adapters_of_all_its_ranks(tmp_path: Path) -> None:
    """Each of a node's rings leaves it once, through an adapter of its own."""
    file = tmp_path / "mine.toml"
    file.write_text(GOOD)
    found = cluster(str(file))
    assert [found.near(span, ranks) for span, ranks in ((4, 4), (8, 8), (8, 2), (16, 8))] == [(), (4,), (1,), (2,)]
    whole, apart = (found.seconds("all_gather", 1e9, 8, 1, near) for near in ((4,), (1,)))
    assert whole == pytest.approx(1e9 / 4e9 + 1 * 50e-6 + 6 * 5e-6)
    assert apart == pytest.approx(1e9 / 1e9 + 7 * 50e-6)
    assert found.seconds("all_to_all", 1e9, 8, 1, (4,)) == pytest.approx(apart)
    assert found.seconds("all_reduce", 1e9, 4, 1, ()) == pytest.approx(1e9 / 25e9 + 6 * 5e-6)
    measured = GOOD + "\n[links.measured.all_gather]\nbandwidth = 2e9\nlatency = 1e-6\n"
    file = tmp_path / "measured.toml"
    file.write_text(measured)
    assert cluster(str(file)).seconds("all_gather", 1e9, 8, 1, (4,)) == pytest.approx(1e9 / 2e9 + 7 * 1e-6)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("memory = 24e9\n", "", "memory is missing"),
        ("bf16 = 100e12\n", "", "[peak] is empty"),
        ("bf16 = 100e12", "bf16 = -1", "peak.bf16 must be a number above 0"),
        ("efficiency = 0.4", "efficiency = 4.0", "at most 1"),
        ("devices = 4", "devices = 4.5", "devices must be a whole number"),
        ("latency = 5e-6\n", "", "links.node.latency is missing"),
        ("ranks = 4\n", "", "links.node needs ranks"),
        ("bandwidth = 1e12", "bandwith = 1e12", "bandwidth is missing"),
        ('name = "Mine"', 'name = "Mine"\nnodes = 3', "there is no 'nodes'"),
        ("[peak]", "[peak", "can't be read"),
        ("memory = 24e9\nbandwidth = 1e12\n", "", "memory, bandwidth are missing"),
    ],
)
def test_a_hole_in_a_file_is_one_sentence(tmp_path: Path, old: str, new: str, words: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(GOOD.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        cluster(str(file))
    assert words in str(caught.value)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_holes_of_a_file_are_named_at_once(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    lines = [line for line in GOOD.splitlines() if not line.startswith(("memory", "latency", "[peak]", "bf16"))]
    file.write_text("\n".join(lines))
    with pytest.raises(ConfigError) as caught:
        cluster(str(file))
    assert str(caught.value) == (f"{file}: memory, peak, links.node.latency, links.cluster.latency are missing.")
    file.write_text('name = "Mine"')
    with pytest.raises(ConfigError, match=r"devices, .* peak, \[\[links\]\], the fastest level first, are missing\."):
        cluster(str(file))


def test_an_unknown_device_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no data sheet of a device 'h10'\. Did you mean"):
        cluster("h10")


def test_a_precision_without_a_peak(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(GOOD)
    with pytest.raises(ConfigError, match=r"\[peak\] has no fp32"):
        cluster(str(file)).flops("fp32")
