"""The laws among several ranks. Law 2 is in test_compositions.py; law 3 in test_topologies.py, and with a rank that is
killed in test_killed_rank.py; law 6 also in test_launch.py and test_bad_layouts.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import law_cases
from forge_train_tools.testing import Pool

pytestmark = [pytest.mark.dist]


def test_1_the_order_of_plugins_plays_no_part_on_four_ranks(ranks: Pool, tmp_path: Path) -> None:
    first, *others = ranks.run(law_cases.orders, 4, folder=str(tmp_path))
    assert [line["plugin"] for line in json.loads(first[0])] == ["tp", "ac", "fsdp2"]
    assert len(first) == 6
    assert set(first) == {first[0]}
    assert all(other == first for other in others)


def test_4_nothing_is_ignored_on_two_ranks(ranks: Pool, tmp_path: Path) -> None:
    first, second = ranks.run(law_cases.ignored, 2, folder=str(tmp_path))
    assert first == second
    assert "'claims' matched nothing in this model; leave claims out of --plugins" in first["nothing"]
    assert first["one rank"] == "['head']", "what one rank matches is enough"
    assert first["axis"].startswith("parallel.tp is 2, but no enabled plugin covers the axis 'tp'.")


def test_6_every_rank_hears_who_differs_in_what(ranks: Pool) -> None:
    said = ranks.run(law_cases.disagreeing, 3)
    message, *others = said
    assert message.splitlines() == [
        "The processes do not agree:",
        "  plugin lion: None on rank 0, {'version': '1'} on rank 2",
        "  train.steps: 5 on rank 0, 6 on rank 1, 2",
    ]
    assert others == [message, message]


@pytest.mark.parametrize(
    ("name", "plugins", "config"),
    [
        ("fsdp2", ["fsdp2", "ac"], {}),
        ("ddp", ["ddp"], {}),
        pytest.param("tp", ["tp"], {"parallel__tp": 2}, marks=pytest.mark.extended),
        ("cp", ["cp", "fsdp2"], {"parallel__cp": 2, "text__isolate": False}),
    ],
)
def test_9_nothing_is_read_between_logged_steps_on_two_ranks(
    ranks: Pool, tmp_path: Path, name: str, plugins: list[str], config: dict[str, int]
) -> None:
    """But twice a step on the CPU: weight and tokens of all ranks' batches, and whether anybody asked for something, in
    the answer of the step before."""
    for counts in ranks.run(law_cases.reads, 2, folder=str(tmp_path), name=name, plugins=plugins, **config):
        assert counts == {
            "tolist forward.py": 6,
            "__bool__ distributed.py": 5,
        }  # nobody was asked before the first step


@pytest.mark.extended
def test_one_process_trains_on_several_layouts_in_turn(ranks: Pool, tmp_path: Path) -> None:
    """Each with a process group of its own, which is gone when the next begins."""
    for first, second, again in ranks.run(law_cases.layouts_in_turn, 4, timeout=200, folder=str(tmp_path)):
        assert first == again
        assert second == pytest.approx(first, rel=1e-5)
