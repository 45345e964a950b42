"""`capture` over ranks: the files of a layout are those of one process, for every module."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import capture_cases
from crossed import few, marked
from forge_train_tools.testing import Pool

pytest.importorskip("transformers")
pytestmark = [pytest.mark.dist]

HALVES = {"train.micro_batch": 4}
LAYOUTS: Mapping[str, tuple[int, list[str], dict[str, Any]]] = {
    "fsdp2": (2, ["fsdp2", "ac"], {"parallel.dp_shard": 2}),
    "tp2": (2, ["tp"], {"parallel.tp": 2, **HALVES}),
    "tp2_whole": (2, ["tp"], {"parallel.tp": 2, "tp.sequence_parallel": False, "tp.loss_parallel": False, **HALVES}),
    "pp2": (2, ["pp"], {"parallel.pp": 2}),
    "cp2": (2, ["cp", "fsdp2"], {"parallel.cp": 2, **HALVES}),
    "ep2": (2, ["ep", "fsdp2"], {"parallel.dp_shard": 2, "parallel.ep": 2}),
    "tp2cp2": (4, ["tp", "cp", "fsdp2"], {"parallel.tp": 2, "parallel.cp": 2}),
}
EXACT = ("fsdp2", "pp2")
"""Layouts on which every row is computed as one process computes it."""
CELLS = (
    *(("decoder", layout) for layout in ("fsdp2", "tp2", "tp2_whole", "pp2", "cp2")),
    *(("moe", "ep2"), ("moe", "tp2"), ("mla", "tp2"), ("delta_net", "cp2"), ("delta_net", "tp2")),
    *(("arcee", "tp2_whole"), ("arcee", "pp2"), ("olmoe", "ep2"), ("gpt_neox", "cp2")),
)


IN_CI = (
    *(("decoder", "fsdp2"), ("decoder", "pp2"), ("decoder", "cp2"), ("moe", "ep2"), ("mla", "tp2")),
    *(("delta_net", "tp2"), ("arcee", "tp2_whole"), ("arcee", "pp2"), ("gpt_neox", "cp2")),
)
"""Every kind of module, and every layout of a decoder and of a class of transformers."""


@pytest.mark.parametrize(("model", "layout"), few(CELLS, IN_CI))
def test_one_process_on_any_layout(model: str, layout: str, ranks: Pool, tmp_path: Path) -> None:
    world, plugins, config = LAYOUTS[layout]
    common = {"capture.steps": [1], "cross_entropy.chunk": 8}
    (one,) = ranks.run(capture_cases.train, 1, folder=str(tmp_path / "one"), model=model, plugins=[], config=common)
    both = {**common, **config}
    some = ranks.run(
        capture_cases.train, world, folder=str(tmp_path / "some"), model=model, plugins=plugins, config=both
    )
    theirs, about = capture_cases.captured(one["run"], "step-00000001")
    ours, here = capture_cases.captured(some[0]["run"], "step-00000001")
    assert here["left_out"] == about["left_out"] == "{}"
    assert here["axes"] == about["axes"]
    assert ours.keys() == theirs.keys()
    for name, right in theirs.items():
        assert ours[name].shape == right.shape, name
        exact = layout in EXACT or not right.is_floating_point()
        near = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(ours[name], right, **near, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("layout", marked(["tp2", "fsdp2"], ["fsdp2"]))
def test_no_number_of_a_run_changes(layout: str, ranks: Pool, tmp_path: Path) -> None:
    world, plugins, config = LAYOUTS[layout]

    def numbers(name: str, **more: Any) -> Any:
        both = {**config, **more}
        given: dict[str, Any] = {"model": "decoder", "plugins": plugins, "config": both}
        return ranks.run(capture_cases.train, world, folder=str(tmp_path / name), **given)[0]["numbers"]

    seldom = {"capture.modules": ["norm"], "capture.steps": [1], "capture.reduce": "last"}
    assert numbers("all", **{"capture.every": 1}) == numbers("seldom", **seldom)
