"""The way to torch.distributed.checkpoint (DCP) and back: every bit arrives, and no pickle of a folder runs code."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import tiny_models
from forge_cli import forge
from forge_train import ConfigError
from forge_train.checkpoint import checkpoint
from forge_train.checkpoint.seal import ALONE
from forge_train_kit.stored import Base, weights_digest
from forge_train_tools.offline.dcp import export_dcp, import_dcp
from forge_train_tools.offline.differences import compare
from forge_train_tools.offline.examine import examine
from saving import save_step

pytestmark = [pytest.mark.unit, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

STATE: dict[str, Any] = {
    "model": {
        "w": torch.randn(7, 5),
        "half": torch.randn(3).bfloat16(),
        "byte": torch.randn(4).to(torch.float8_e4m3fn),
        "count": torch.tensor(3),
        "mask": torch.tensor([True, False]),
        "empty": torch.empty(0, 3),
        "wave": torch.randn(3, dtype=torch.complex64),
    },
    "optimizer": {"state": {"w": {"codes": torch.arange(9, dtype=torch.uint8), "step": 4}}, "betas": (0.9, 0.99)},
    "progress": {"step": 1, "tokens": 2},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save_step(tmp_path / "checkpoints", 1, STATE, ALONE, beside=[]).path


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_torch_reads_what_is_exported(path: Path, tmp_path: Path) -> None:
    export_dcp(path, tmp_path / "out")
    entries = FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    read = {n: torch.empty(e.size, dtype=e.properties.dtype) for n, e in entries.items()}  # type: ignore[union-attr]
    assert all(isinstance(entry, TensorStorageMetadata) for entry in entries.values())
    dcp.load(read, checkpoint_id=tmp_path / "out", no_dist=True)
    assert read.keys() == {*(f"model.{name}" for name in STATE["model"]), "optimizer.state.w.codes"}
    assert all(same(read[f"model.{name}"], tensor) for name, tensor in STATE["model"].items())


def test_there_and_back(path: Path, tmp_path: Path) -> None:
    export_dcp(path, tmp_path / "out")
    import_dcp(tmp_path / "out", tmp_path / "back")
    assert examine(tmp_path / "back").problem == ""
    found = compare(path, tmp_path / "back")
    assert (found.tensors, found.state) == ((), ())
    read = checkpoint.load(tmp_path / "back", {}, ALONE)
    assert all(same(read["model"][name], tensor) for name, tensor in STATE["model"].items())
    assert read["optimizer"]["betas"] == (0.9, 0.99)


def theirs(folder: Path) -> dict[str, Any]:
    """A checkpoint as torchtitan writes one: weights at the top, everything else below a name."""
    state = {
        "tok_embeddings.weight": torch.randn(8, 4),
        "layers.0.attention.wq.weight": torch.randn(4, 4).bfloat16(),
        "optimizer": {"state": {"tok_embeddings.weight": {"exp_avg": torch.ones(8, 4)}}},
        "lr_scheduler": {"last_epoch": 3},
        "train_state": {"step": 3},
    }
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return state


@pytest.mark.parametrize("start", ["", "model."])
def test_the_weights_of_another_program(tmp_path: Path, start: str) -> None:
    weights = {f"{start}{name}": torch.randn(3, 2) for name in ("a.weight", "b.weight")}
    dcp.save({**weights, "train_state": {"step": 3}}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    import_dcp(tmp_path / "theirs", tmp_path / "ours")
    read = checkpoint.load(tmp_path / "ours", {}, ALONE)["model"]
    assert read.keys() == {"a.weight", "b.weight"}
    assert all(same(read[name.removeprefix("model.")], tensor) for name, tensor in weights.items())


def test_the_command_says_what_is_left_out_and_what_is_next(tmp_path: Path) -> None:
    state = theirs(tmp_path / "theirs")
    ended = forge("checkpoint", "inspect", tmp_path / "theirs")
    assert f"Import it first: forge checkpoint import {tmp_path / 'theirs'} NEW" in ended.err
    for option in ("--from", "--resume"):
        ended = forge("train", option, tmp_path / "theirs", "--run-dir", tmp_path, "-q")
        assert (ended.code, "import the folder first: forge checkpoint import FOLDER NEW" in ended.err) == (2, True)
    ended = forge("checkpoint", "import", tmp_path / "theirs", tmp_path / "ours")
    assert ended.code == 0, ended.err
    assert "optimizer.state.tok_embeddings.weight.exp_avg" in ended.err
    assert f"train.init_from={tmp_path / 'ours'}; train.init_map renames" in ended.err
    read = checkpoint.load(tmp_path / "ours", {}, ALONE)["model"]
    assert read.keys() == {"tok_embeddings.weight", "layers.0.attention.wq.weight"}
    assert all(same(tensor, state[name]) for name, tensor in read.items())
    ended = forge("checkpoint", "import", tmp_path / "theirs", tmp_path / "again", "-s", "decoder.dim=3")
    assert (ended.code, "is a DCP folder" in ended.err) == (2, True)


def test_the_command_exports_a_run(path: Path, tmp_path: Path) -> None:
    ended = forge("checkpoint", "export", "--format", "dcp", path, tmp_path / "out", "--json")
    assert (ended.code, ended.json["path"], ".metadata" in ended.json["files"]) == (0, str(tmp_path / "out"), True)
    ended = forge("checkpoint", "export", "--format", "dcp", path, tmp_path / "again", "--dtype", "bf16")
    assert (ended.code, "--dtype and --nproc don't apply" in ended.err) == (2, True)
    ended = forge("checkpoint", "export", "--format", "dcp", path, tmp_path / "out")
    assert (ended.code, "exists and is not empty" in ended.err) == (2, True)


def test_a_run_starts_from_imported_weights(tmp_path: Path) -> None:
    run = tiny_models.trained(tmp_path)
    trained = checkpoint.resolve(run)
    names = [name for name in checkpoint.shapes(trained) if name.startswith("model.")]
    held = checkpoint.load(trained, {}, ALONE)["model"]
    dcp.save({name: held[name.removeprefix("model.")] for name in names}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    import_dcp(tmp_path / "dcp", tmp_path / "ours")
    values = ("-s", f"train.init_from={tmp_path / 'ours'}", "-s", "train.steps=1", "-s", "adamw.lr=1e-30")
    ended = forge("train", run / "config.toml", "--run-dir", tmp_path / "new", "--name", "new", "-q", *values)
    assert ended.code == 0, ended.err
    found = compare(trained, tmp_path / "new" / "new" / "checkpoints" / "step-00000001", prefix="model.")
    assert found.tensors == ()


class Touches:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def test_a_hostile_index_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    victim = tmp_path / "touched"
    harmful = [pickle.dumps(Touches(victim), protocol) for protocol in (2, 4)]
    harmful += [b"cbuiltins\ngetattr\n(cos\nsystem\nX\x01\x00\x00\x00xtR.", b"", b"[", pickle.dumps([1])]
    for data in harmful:
        (tmp_path / "theirs" / ".metadata").write_bytes(data)
        with pytest.raises(ConfigError, match=r"\.metadata: not an index of torch\.distributed\.checkpoint"):
            import_dcp(tmp_path / "theirs", tmp_path / "ours")
        assert not victim.exists()
    assert not (tmp_path / "ours").exists()


def test_a_hostile_tensor_runs_nothing(tmp_path: Path) -> None:
    victim = tmp_path / "touched"
    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    (file,) = (tmp_path / "theirs").glob("*.distcp")
    size = file.stat().st_size
    torch.save(Touches(victim), file)
    file.write_bytes(file.read_bytes().ljust(size))
    with pytest.raises(ConfigError, match="'a' can't be read by torch with weights_only"):
        import_dcp(tmp_path / "theirs", tmp_path / "ours")
    assert not victim.exists()
    assert [one.name for one in tmp_path.iterdir()] == ["theirs"]


def test_a_partial_checkpoint_follows_its_base(tmp_path: Path) -> None:
    base = save_step(tmp_path / "base", 1, STATE, ALONE, beside=[]).path
    part = {"model": {"w": torch.ones(7, 5)}, "progress": {"step": 1}, "base": vars(Base.of(base))}
    adapter = save_step(tmp_path / "adapter", 1, part, ALONE, beside=[]).path
    export_dcp(adapter, tmp_path / "out")
    import_dcp(tmp_path / "out", tmp_path / "same")
    assert checkpoint.read_state(tmp_path / "same")["base"]["digest"] == weights_digest(base)
    state = json.loads((tmp_path / "out" / "state.json").read_text())
    state["base"]["digest"] = "of another"
    (tmp_path / "out" / "state.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match=f"the others are those of {base}. Import that one first"):
        import_dcp(tmp_path / "out", tmp_path / "other")
