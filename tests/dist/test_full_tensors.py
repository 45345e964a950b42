"""`checkpoint.format` on ranks: full tensors are what the shards hold, and a run continues from them anywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from crossed import few, marked
from forge_train.checkpoint.checkpoint import check, found, shapes
from forge_train.run.records import read
from forge_train.store.shards import whole as whole_range
from forge_train.store.tensors import read_range
from forge_train_kit.full_tensors import INDEX
from forge_train_tools.offline.examine import examine
from forge_train_tools.testing import Pool

pytestmark = [pytest.mark.dist]

MODEL = {"decoder.layers": 2, "decoder.tied": True, "moe.experts": 4, "moe.hidden": 16}
PLACES: dict[str, tuple[int, tuple[str, ...], Mapping[str, Any]]] = {
    "one": (1, (), {}),
    "pp2, two parts": (2, ("pp",), {"parallel.pp": 2, "pp.schedule": "zbv"}),
    "tp2": (2, ("tp",), {"parallel.tp": 2}),
    "tp2 × dp2": (4, ("tp", "fsdp2"), {"parallel.tp": 2}),
    "ep2 × dp2": (4, ("ep", "fsdp2"), {"parallel.ep": 2}),
}


def train(ranks: Pool, folder: Path, place: str, form: str, **more: Any) -> list[dict[str, Any]]:
    world, plugins, config = PLACES[place]
    folder.mkdir(exist_ok=True)
    values = {**MODEL, **config, "checkpoint.format": form, "checkpoint.asynchronous": True}
    arguments = {"folder": str(folder), "plugins": ("moe", *plugins), "config": values, "steps": 4}
    replies: list[dict[str, Any]] = ranks.run("cases:train", world, name="run", **arguments, **more)
    return replies


def resumed_from(replies: list[dict[str, Any]]) -> int:
    (step,) = (one["step"] for one in read(Path(replies[0]["run"]) / "events.jsonl") if one["event"] == "resumed")
    return int(step)


def full_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """What any program reads that knows safetensors."""
    index = json.loads((checkpoint / INDEX).read_text(encoding="utf-8"))["weight_map"]
    tensors = {name: tensor for file in set(index.values()) for name, tensor in load_file(checkpoint / file).items()}
    assert tensors.keys() == index.keys()
    return tensors


@pytest.mark.parametrize("place", marked([place for place in PLACES if place != "one"], ["tp2", "tp2 × dp2"]))
def test_full_tensors_are_what_the_shards_hold(ranks: Pool, tmp_path: Path, place: str) -> None:
    train(ranks, tmp_path / "runs", place, "both", stop_at=1)
    (saved,) = found(tmp_path / "runs" / "run" / "checkpoints")
    assert examine(saved.path).problem == ""
    full = full_tensors(saved.path)
    held = {name: one for name, one in shapes(saved.path).items() if name.startswith("model.")}
    assert {f"model.{name}" for name in full} == held.keys()
    for name, one in held.items():
        assert torch.equal(full[name.removeprefix("model.")], read_range(saved.path, name, whole_range(one[0]))), name


@pytest.fixture(scope="module")
def whole(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The run that nothing interrupts, on one process."""
    return train(ranks, tmp_path_factory.mktemp("whole"), "one", "sharded")[0]


@pytest.mark.parametrize(
    ("before", "after"),
    few(
        [("one", "pp2, two parts"), ("pp2, two parts", "tp2 × dp2"), ("ep2 × dp2", "one")],
        [("ep2 × dp2", "one")],
    ),
)
def test_goes_on_elsewhere(ranks: Pool, tmp_path: Path, whole: dict[str, Any], before: str, after: str) -> None:
    train(ranks, tmp_path / "runs", before, "safetensors", stop_at=2)
    resumed = train(ranks, tmp_path / "runs", after, "safetensors")
    assert resumed_from(resumed) in (2, 3)  # several ranks stop a step later
    for reply in resumed:
        assert reply["losses"] == pytest.approx(whole["losses"], rel=1e-5)
        assert reply["norms"] == pytest.approx(whole["norms"], rel=1e-5)


def test_repeats_bit_for_bit_and_changes_the_format(ranks: Pool, tmp_path: Path) -> None:
    uninterrupted = train(ranks, tmp_path / "uninterrupted", "tp2", "sharded")
    train(ranks, tmp_path / "resumed", "tp2", "safetensors", stop_at=2)
    resumed = train(ranks, tmp_path / "resumed", "tp2", "both")
    for what in ("losses", "norms", "weights"):
        assert [one[what] for one in resumed] == [one[what] for one in uninterrupted]
    assert resumed_from(resumed) == 3
    saved = found(Path(resumed[0]["run"]) / "checkpoints")
    assert [(one.step, check(one.path, contents=True)) for one in saved] == [(4, ""), (3, "")]
