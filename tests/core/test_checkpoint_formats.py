"""Every released format of a checkpoint stays readable: one of each is kept in `tests/formats/`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from forge_train import ConfigError
from forge_train.storage import checkpoint
from forge_train.storage.manifest import FORMAT
from forge_train.storage.seal import ALONE
from forge_train_tools.offline.examine import examine
from tiny_models import reseal

pytestmark = [pytest.mark.unit, pytest.mark.accept("checkpoints", "format")]

FORMATS = Path(__file__).parents[1] / "formats"
RELEASED = {"0.1.0": 1}
"""The first version that writes it → format."""


def test_every_format_has_its_checkpoint() -> None:
    assert sorted(path.name for path in FORMATS.iterdir()) == sorted(RELEASED)
    assert set(RELEASED.values()) == set(range(1, FORMAT + 1))
    for path in FORMATS.iterdir():
        assert sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) < 30_000


@pytest.mark.parametrize("version", RELEASED)
def test_a_released_format_is_read_as_it_was_written(version: str) -> None:
    path = FORMATS / version
    assert examine(path).problem == ""
    assert checkpoint.resolve(path) == path
    assert checkpoint.read_state(path)["format"] == RELEASED[version]
    weight = torch.arange(12.0).reshape(3, 4)
    read = checkpoint.load(path, {"model.weight": torch.zeros(3, 4)}, ALONE)
    assert torch.equal(read["model"]["weight"], weight)
    assert torch.equal(read["model"]["half"], torch.tensor([0.5, -2.0], dtype=torch.bfloat16))
    held = read["optimizer"]["state"]["weight"]
    assert torch.equal(held["exp_avg"], weight / 8)
    assert torch.equal(held["codes"], torch.tensor([1, 2, 255], dtype=torch.uint8))
    assert held["step"] == 7
    assert read["optimizer"]["betas"] == (0.9, 0.99)
    assert read["progress"] == {"step": 7, "tokens": 4096}
    assert read["plugins"] == {"loss": float("inf"), "history": [1.5, 2.5]}
    assert read["config"] == {"train.steps": 7, "adamw.lr": 0.002}
    assert (path / "config.toml").read_text() == "plugins = []\n\n[train]\nsteps = 7\n"


@pytest.mark.parametrize("where", ["manifest.json", "state.json"])
def test_a_newer_format_is_refused_by_name(tmp_path: Path, where: str) -> None:
    run = tmp_path / "run"
    for step in (1, 2):
        state = {"model": {"a": torch.ones(2)}, "progress": {"step": step}}
        path = checkpoint.save(run / "checkpoints", step, state, ALONE, beside=[]).path
    table = json.loads((path / where).read_text())
    (path / where).write_text(json.dumps({**table, "format": FORMAT + 1}))
    if where == "state.json":
        reseal(path)
    said = f"^{path}: written by a newer forge: format {FORMAT + 1}, this reads {FORMAT}. Update forge-train"
    with pytest.raises(ConfigError, match=said):
        checkpoint.read_state(checkpoint.resolve(path))
    with pytest.raises(ConfigError, match=said):  # and no older one is taken instead, or the run would go back
        checkpoint.read_state(checkpoint.resolve(run))


def test_a_manifest_without_a_format_is_of_the_first(tmp_path: Path) -> None:
    path = shutil.copytree(FORMATS / "0.1.0", tmp_path / "moved")
    table = json.loads((path / "manifest.json").read_text())
    table.pop("format", None)
    (path / "manifest.json").write_text(json.dumps(table))
    assert examine(path).problem == ""
