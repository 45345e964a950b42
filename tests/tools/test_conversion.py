"""From one Hugging Face layout to another: the same values, a few at a time, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import chat_model
from forge_train import ConfigError
from forge_train.base.files import DiskError
from forge_train_kit.hf.folder import Folder
from forge_train_tools.offline.convert import convert_folder
from forge_train_tools.planning.ledger import Ledger
from full_disk import full_for

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.unit]

TOKENS = torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(1))
MAPS = """
from forge_train_kit.hf import HFModel
from forge_train_kit.state_map import Concat, Rename, Transpose

QKV = tuple(f"model.layers.{{i}}.self_attn.{one}_proj.weight" for one in "qkv")
REST = Rename({"{x*}": "{x*}"})
FUSED = Concat(QKV, "model.layers.{i}.self_attn.qkv_proj.weight", shares=(2, 1, 1)) >> REST
def described(config):
    return HFModel(Transpose(("lm_head.weight",)) >> REST, {"architectures": ["Other"], "n": config["vocab_size"]})
LOSSY = Rename({"model.{x*}": "{x*}"})
NUMBER = 3
def fails(config):
    return config["nothing"]
"""


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    chat_model.write_model(tmp_path / "hf")
    (tmp_path / "maps.py").write_text(MAPS)
    return tmp_path / "hf"


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()}


def config(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


def logits(folder: Path) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype="float32")
    found: Tensor = model(TOKENS).logits
    return found


def test_another_dtype_in_several_files(hf: Path, tmp_path: Path) -> None:
    done = convert_folder(hf, tmp_path / "out", dtype=torch.bfloat16, shard_bytes=50_000)
    assert len(done.files) > 2
    ours, theirs = tensors(tmp_path / "out"), tensors(hf)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name].bfloat16()) for name in theirs)
    assert done.parameters == sum(one.numel() for one in theirs.values())
    said = config(tmp_path / "out")
    assert {said.pop(key) for key in ("dtype", "torch_dtype") if key in said} == {"bfloat16"}
    assert all(config(hf)[key] == value for key, value in said.items())
    beside = {file.name for file in hf.iterdir() if file.suffix != ".safetensors"} - {"config.json"}
    assert {"tokenizer.json", "generation_config.json", "chat_template.jinja"} <= beside
    assert all((tmp_path / "out" / name).read_bytes() == (hf / name).read_bytes() for name in beside)
    again = convert_folder(tmp_path / "out", tmp_path / "again", shard_bytes=10**9)
    assert again.files == ("model.safetensors",)
    assert all(torch.equal(one, ours[name]) for name, one in tensors(tmp_path / "again").items())


@pytest.mark.slow
def test_another_architecture_gives_the_same_logits(hf: Path, tmp_path: Path) -> None:
    convert_folder(hf, tmp_path / "out", architecture="MistralForCausalLM")
    assert config(tmp_path / "out")["architectures"] == ["MistralForCausalLM"]
    assert config(tmp_path / "out")["eos_token_id"] == 0
    assert (logits(tmp_path / "out") - logits(hf)).abs().max() <= 1e-5
    with pytest.raises(ConfigError, match=r"Qwen3ForCausalLM can't hold this model"):
        convert_folder(hf, tmp_path / "no", architecture="Qwen3ForCausalLM")
    with pytest.raises(ConfigError, match=r"no enabled plugin writes 'MistralForCausalLm'\. Did you mean 'MistralForC"):
        convert_folder(hf, tmp_path / "no", architecture="MistralForCausalLm")
    assert not (tmp_path / "no").exists()


def test_a_map_in_a_file(hf: Path, tmp_path: Path) -> None:
    convert_folder(hf, tmp_path / "fused", state_map=f"{tmp_path}/maps.py:FUSED")
    ours, theirs = tensors(tmp_path / "fused"), tensors(hf)
    parts = [theirs[f"model.layers.1.self_attn.{one}_proj.weight"] for one in "qkv"]
    assert torch.equal(ours["model.layers.1.self_attn.qkv_proj.weight"], torch.cat(parts))
    assert torch.equal(ours["lm_head.weight"], theirs["lm_head.weight"])
    convert_folder(hf, tmp_path / "other", state_map=f"{tmp_path}/maps.py:described")
    assert torch.equal(tensors(tmp_path / "other")["lm_head.weight"], theirs["lm_head.weight"].t())
    assert config(tmp_path / "other") == {
        "architectures": ["Other"],
        "n": config(hf)["vocab_size"],
        "torch_dtype": "float32",
    }


MISTAKES = {
    "maps.py:LOSSY": r"lm_head\.weight: nothing takes it",
    "maps.py:NUMBER": r"NUMBER is a int; expected a StateMap or an HFModel",
    "maps.py:fails": r"fails failed for .*config\.json: KeyError: 'nothing'",
    "maps.py:FUSE": r"has no 'FUSE'\. Did you mean 'FUSED'\?",
    "maps.py": r"names no object; write FILE\.py:NAME",
    "none.py:MAP": r"there is no file .*none\.py",
}


@pytest.mark.parametrize("spec", MISTAKES)
def test_a_map_that_is_wrong_is_told_how(hf: Path, tmp_path: Path, spec: str) -> None:
    with pytest.raises(ConfigError, match=MISTAKES[spec]):
        convert_folder(hf, tmp_path / "out", state_map=f"{tmp_path}/{spec}")
    assert not (tmp_path / "out").exists()


def test_scales_are_not_cast_away_from_their_values(hf: Path, tmp_path: Path) -> None:
    packed = {"w": torch.zeros(128, 128, dtype=torch.float8_e4m3fn), "w_scale": torch.ones(1, 1), "n": torch.arange(3)}
    (hf / "model.safetensors").unlink()
    save_file(packed, hf / "model.safetensors")
    with pytest.raises(ConfigError, match=r"is quantised[\s\S]*w: stored as F8_E4M3"):
        convert_folder(hf, tmp_path / "out", dtype=torch.bfloat16)
    convert_folder(hf, tmp_path / "out", shard_bytes=10_000)
    ours = tensors(tmp_path / "out")
    assert {name: one.dtype for name, one in ours.items()} == {name: one.dtype for name, one in packed.items()}
    with pytest.raises(ConfigError, match="give only one of them"):
        convert_folder(hf, tmp_path / "no", architecture="A", state_map="b.py:C")


def test_a_full_disk_leaves_nothing_half_written(hf: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    with full_for(".safetensors", below="out"), pytest.raises(DiskError, match=r"out: can't be written: No space left"):
        convert_folder(hf, tmp_path / "out", dtype=torch.bfloat16)
    assert sorted(tmp_path.iterdir()) == before
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "model.safetensors").write_bytes(b"of a killed process")
    convert_folder(hf, tmp_path / "out")
    assert not (tmp_path / ".out.partial").exists()
    with pytest.raises(ConfigError, match="out exists and is not empty"):
        convert_folder(hf, tmp_path / "out")


def test_memory_is_twice_the_largest_group_at_most(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Folder.read
    monkeypatch.setattr(Folder, "read", lambda self, *where: real(self, *where).clone())  # files are not torch's memory
    largest = max(one.nbytes for one in tensors(hf).values())
    with Ledger() as ledger:
        convert_folder(hf, tmp_path / "out", dtype=torch.bfloat16)
    assert largest <= ledger.peak() <= 2 * largest
