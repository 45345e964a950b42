"""`steer` and the hook `intervene` over ranks: evaluations equal those of one process, and those by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import steer_cases
from crossed import few, marked
from forge_train_tools.testing import Pool

pytestmark = [pytest.mark.dist]

LAYOUTS: Mapping[str, tuple[int, list[str], dict[str, Any]]] = {
    "fsdp2": (2, ["fsdp2"], {"parallel.dp_shard": 2}),
    "tp2": (2, ["tp"], {"parallel.tp": 2}),
    "tp2_whole": (2, ["tp"], {"parallel.tp": 2, "tp.sequence_parallel": False}),
    "pp2": (2, ["pp"], {"parallel.pp": 2}),
    "cp2": (2, ["cp", "fsdp2"], {"parallel.cp": 2}),
}


@pytest.mark.parametrize("layout", marked(LAYOUTS, ["tp2_whole"]))
def test_one_process_on_any_layout(layout: str, ranks: Pool, tmp_path: Path) -> None:
    """A vector, two heads, and an edit by another plugin that depends on samples and positions."""
    config = {**steer_cases.HEADS, **steer_cases.settings(tmp_path)}
    given: dict[str, Any] = {"model": "decoder", "plugins": ["steer", "Marks"], "config": config}
    (one,) = ranks.run(steer_cases.evaluated, 1, folder=str(tmp_path / "one"), **given)
    world, plugins, more = LAYOUTS[layout]
    given = {**given, "plugins": ["steer", "Marks", *plugins], "config": {**config, **more}}
    for rank in ranks.run(steer_cases.evaluated, world, folder=str(tmp_path / layout), **given):
        assert rank["losses"] == pytest.approx(one["losses"], rel=1e-5)


@pytest.mark.parametrize(
    ("model", "layout"),
    few([("decoder", "tp2"), ("mla", "tp2"), ("delta_net", "tp2_whole")], [("mla", "tp2"), ("delta_net", "tp2_whole")]),
)
def test_a_zeroed_head_is_one_without_columns(model: str, layout: str, ranks: Pool, tmp_path: Path) -> None:
    world, plugins, more = LAYOUTS[layout]

    def losses(plugin: str, config: Mapping[str, Any]) -> list[float]:
        given = {"model": model, "plugins": [plugin, *plugins], "config": {**config, **more}}
        found: list[float] = ranks.run(steer_cases.evaluated, world, folder=str(tmp_path / plugin), **given)[0][
            "losses"
        ]
        return found

    assert losses("steer", steer_cases.HEADS) == pytest.approx(losses("ByHand", {}), rel=1e-6)
