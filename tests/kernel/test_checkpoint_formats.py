"""Every released format of a checkpoint stays readable, older ones by an import: `tests/formats/` has one of each."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import xxhash

from forge_cli import forge
from forge_train import ConfigError
from forge_train.checkpoint import checkpoint
from forge_train.checkpoint.seal import ALONE
from forge_train.store.manifest import FORMAT
from forge_train_kit.stored import weights_digest
from forge_train_tools.offline.dcp import import_dcp, old_digest
from forge_train_tools.offline.examine import examine
from saving import save_step
from tiny_models import flip, reseal

pytestmark = [pytest.mark.unit]

FORMATS = Path(__file__).parents[1] / "formats"


def test_every_format_has_its_checkpoint() -> None:
    assert sorted(path.name for path in FORMATS.iterdir()) == [*map(str, range(1, FORMAT + 1))]
    for path in FORMATS.iterdir():
        assert sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) < 30_000


@pytest.mark.parametrize("number", range(1, FORMAT + 1))
def test_a_released_format_is_read_as_it_was_written(tmp_path: Path, number: int) -> None:
    path = FORMATS / str(number)
    if number < FORMAT:
        path = import_dcp(path, tmp_path / "imported").path
    assert examine(path).problem == ""
    assert checkpoint.resolve(path) == path
    assert checkpoint.read_state(path)["format"] == FORMAT
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


@pytest.mark.parametrize("number", range(1, FORMAT))
def test_an_older_format_is_imported_before_it_is_used(tmp_path: Path, number: int) -> None:
    old = FORMATS / str(number)
    said = (
        f"{old}: written by an older forge: format {number}, this reads 3. Import it: forge checkpoint import {old} NEW"
    )
    for command in (
        ("checkpoint", "inspect", old),
        ("checkpoint", "export", old, tmp_path / "hf"),
        ("checkpoint", "diff", old, old),
        ("generate", old),
        (
            "train",
            "-q",
            "--run-dir",
            tmp_path,
            "-s",
            f"train.init_from={old}",
            "-s",
            f"text.path={__file__}",
            "-s",
            "train.sequence=16",
        ),
        ("train", "-q", "--run-dir", tmp_path, "--resume", old),
    ):
        ended = forge(*command)
        assert (ended.code, ended.err.replace("\n", " ").count(said)) == (2, 1), ended.err
    assert forge("checkpoint", "verify", old).code == 1
    run = tmp_path / "run" / "checkpoints"
    save_step(run, 1, {"model": {"a": torch.ones(2)}, "progress": {"step": 1}}, ALONE, beside=[])
    shutil.copytree(old, run / "step-00000007")
    with pytest.raises(ConfigError, match="step-00000007: written by an older forge"):  # and no older one is taken
        checkpoint.resolve(run.parent)


@pytest.mark.parametrize("where", ["manifest.json", "state.json"])
def test_a_newer_format_is_refused_by_name(tmp_path: Path, where: str) -> None:
    run = tmp_path / "run"
    for step in (1, 2):
        state = {"model": {"a": torch.ones(2)}, "progress": {"step": step}}
        path = save_step(run / "checkpoints", step, state, ALONE, beside=[]).path
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
    path = shutil.copytree(FORMATS / "1", tmp_path / "moved")
    table = json.loads((path / "manifest.json").read_text())
    table.pop("format", None)
    (path / "manifest.json").write_text(json.dumps(table))
    assert examine(path).problem == "written by an older forge: format 1, this reads 3"


@pytest.mark.parametrize("number", range(1, FORMAT + 1))
@pytest.mark.parametrize("file", ["tensors", "index", "state.json"])
def test_one_bit_of_a_checkpoint_of_any_format_is_noticed(tmp_path: Path, number: int, file: str) -> None:
    path = shutil.copytree(FORMATS / str(number), tmp_path / "damaged")
    names = {"tensors": "rank-00000-0.safetensors", "index": "tensors.json"}
    old_names = {"tensors": "__0_0.distcp", "index": ".metadata"}
    name = (names if number == FORMAT else old_names).get(file, file)
    flip(path / name)
    with pytest.raises(ConfigError, match=f"{name} has other contents than were saved"):
        checkpoint.resolve(path) if number == FORMAT else import_dcp(path, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_weights_are_known_by_the_same_digest_as_ever() -> None:
    """An adapter's checkpoint names its base by it."""
    assert old_digest(FORMATS / "1") == "4c189c5aeda84cd18f3c78f1e29551ee4f20b6369d77625ed23a5e9a529206eb"
    assert weights_digest(FORMATS / "3") == "d5ba0794d01a62256dd09c63d02249e36f6782f94ab4a6bb66491e4133976177"


def test_an_older_forge_refuses_what_is_written_now_by_its_format(tmp_path: Path) -> None:
    path = save_step(tmp_path, 1, {"model": {"a": torch.ones(2)}}, ALONE, beside=[]).path
    table = json.loads((path / "manifest.json").read_text())
    assert (table["format"], table["hash"]) == (3, "xxh3_128")
    assert json.loads((path / "state.json").read_text())["format"] == 3
    held = {name: xxhash.xxh3_128((path / name).read_bytes()).hexdigest() for name in table["files"]}
    assert {name: entry["xxh3_128"] for name, entry in table["files"].items()} == held
