"""`torch_optimizer`: every class that is said to be exact on shards is, others are refused there, all are resumed."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from crossed import marked
from forge_train_plugins.optimizers.torch_optimizer import EXACT
from forge_train_tools.testing import Pool
from test_matrix_optimizers import LAYOUTS, alone, farthest, resumed, same_bits, saved, train

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]
OPTIONS: Mapping[str, tuple[float, Mapping[str, Any]]] = {
    "SGD": (0.1, {"momentum": 0.9, "nesterov": True}),
    "RMSprop": (0.003, {"centered": True, "momentum": 0.5}),
    "Adam": (0.01, {"amsgrad": True}),
    "AdamW": (0.01, {"betas": [0.8, 0.95], "fused": True}),
    "Adadelta": (1.0, {}),
    "ASGD": (0.1, {"t0": 1.0}),
}
"""Class → learning rate and options with which the test can tell."""


def settings(name: str) -> dict[str, Any]:
    lr, options = OPTIONS.get(name, (0.01, {}))
    given = {f"torch_optimizer.options.{key}": value for key, value in options.items()}
    return {"torch_optimizer.name": f"torch.optim:{name}", "torch_optimizer.lr": lr, **given}


@pytest.mark.parametrize(
    "name", marked(EXACT, ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "RAdam", "SGD"])
)
def test_a_listed_class_is_exact_on_shards(ranks: Pool, tmp_path: Path, name: str) -> None:
    world, plugins, config = LAYOUTS["fsdp2 uneven"]
    plugins, config = ("torch_optimizer", *plugins), {**config, **settings(name)}
    for folder, size, run in (("many", world, (plugins, config)), ("one", 1, alone(plugins, config))):
        train(ranks, tmp_path / folder, size, *run, steps=5)
    one, many = saved(tmp_path / "one"), saved(tmp_path / "many")
    assert one["state"].keys() == many["state"].keys()
    distance, parameter = farthest(many, one)
    assert distance <= 1e-4, parameter


@pytest.mark.parametrize("name", marked(["NAdam", "Adagrad", "SGD"], ["Adagrad", "SGD"]))
@pytest.mark.extended
def test_it_is_resumed_to_the_bit_and_on_another_layout_within_rounding(ranks: Pool, tmp_path: Path, name: str) -> None:
    world, plugins, config = LAYOUTS["fsdp2 uneven"]
    plugins, config = ("torch_optimizer", *plugins), {**config, **settings(name), "checkpoint.every": 1}
    here = {"steps": 6, "folder": tmp_path}
    resumed(ranks, world, plugins, config, name="whole", **here)
    resumed(ranks, world, plugins, config, name="stopped", stop_at=3, **here)
    shutil.copytree(tmp_path / "stopped", tmp_path / "moved")
    resumed(ranks, world, plugins, config, name="stopped", **here)
    assert same_bits(saved(tmp_path, "stopped"), saved(tmp_path, "whole"))
    resumed(ranks, 4, ("torch_optimizer", "tp", "fsdp2"), {**config, "parallel.tp": 2}, name="moved", **here)
    assert farthest(saved(tmp_path, "moved"), saved(tmp_path, "whole"))[0] <= 1e-4


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_another_class_is_refused_by_name_where_parameters_are_sharded(ranks: Pool, tmp_path: Path, name: str) -> None:
    config = {**LAYOUTS["fsdp2 uneven"][2], **settings(name)}
    says = rf"torch_optimizer\.name: torch\.optim:{name} is not known to be exact on shards, and '.*' is sharded"
    with pytest.raises(Exception, match=says):
        train(ranks, tmp_path / "shards", 2, ("torch_optimizer", "fsdp2"), config, steps=2)


def test_adafactor_works_on_replicas_and_is_resumed(ranks: Pool, tmp_path: Path) -> None:
    config = {**LAYOUTS["ddp"][2], **settings("Adafactor"), "checkpoint.every": 1}
    here = {"steps": 4, "folder": tmp_path}
    resumed(ranks, 1, ("torch_optimizer",), config, name="one", **here)
    resumed(ranks, 2, ("torch_optimizer", "ddp"), config, name="whole", **here)
    resumed(ranks, 2, ("torch_optimizer", "ddp"), config, name="stopped", stop_at=2, **here)
    resumed(ranks, 2, ("torch_optimizer", "ddp"), config, name="stopped", **here)
    assert same_bits(saved(tmp_path, "stopped"), saved(tmp_path, "whole"))
    assert farthest(saved(tmp_path, "whole"), saved(tmp_path, "one"))[0] <= 1e-4
