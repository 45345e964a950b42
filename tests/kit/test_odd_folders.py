"""Folders that hold something else than a model's safetensors files: one sentence each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from forge_train import ConfigError
from forge_train_kit.hf import HFModel
from forge_train_kit.hf.fit import plan
from forge_train_kit.hf.folder import Folder
from forge_train_kit.state_map import Rename

pytestmark = pytest.mark.unit

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1000\n"


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        (
            "adapter_config.json",
            "{}",
            r"adapter_config\.json\. It holds an adapter of PEFT, not a model; name",
        ),
        ("model-Q4.gguf", "GGUF", r"model-Q4\.gguf\. GGUF files are not read; take the safetensors files"),
        ("pytorch_model.bin", "PK", r"pytorch_model\.bin\. Pickled weights are never read; save the model with"),
        ("weights.safetensors", "", r"weights\.safetensors\. Only safetensors files of these names are read"),
        (
            "model.safetensors",
            POINTER,
            r"model\.safetensors: is a pointer of Git LFS, not the file itself; run",
        ),
    ],
)
def test_each_is_named_with_what_to_do(tmp_path: Path, file: str, content: str, says: str) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / file).write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=says):
        Folder.open(tmp_path)
    if file != "model.safetensors":
        (tmp_path / "config.json").unlink()
        with pytest.raises(ConfigError, match=says):
            Folder.open(tmp_path)


def test_two_sets_of_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    for name in ("model.safetensors", "model-00001-of-00001.safetensors"):
        save_file({"weight": torch.zeros(2)}, tmp_path / name)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": "model-00001-of-00001.safetensors"}}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"two sets of weights, model\.safetensors and the files that .* lists"):
        Folder.open(tmp_path)
    index.write_text(json.dumps({"weight_map": {"weight": "model.safetensors"}}), encoding="utf-8")
    assert list(Folder.open(tmp_path).tensors) == ["weight"]


def test_parameters_that_a_plugin_added_are_named_with_the_key_that_starts_them_anew(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    save_file({"model.up.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    layout = HFModel(Rename({"model.up.weight": "up.weight"}))
    wanted = dict.fromkeys(("up.weight", "up.lora_a", "up.lora_b.weight"), ((2, 2), torch.float32))
    folder = Folder.open(tmp_path)
    says = r"(?s)parameters that a plugin added:.*up\.lora_a.*init_missing=\[\"\*\.lora_a\", \"\*\.lora_b\.weight\"\]"
    with pytest.raises(ConfigError, match=says):
        plan(folder, layout, wanted, whose="config.json")
    found = plan(folder, layout, wanted, missing=lambda names: [name for name in names if "lora" in name])
    assert list(found.targets) == ["up.weight"]
    wanted |= dict.fromkeys(("tail.0.up.weight", "tail.1.up.weight", "scale"), ((2, 2), torch.float32))
    says = r"init_missing=\[\"\*\.lora_a\", \"\*\.lora_b\.weight\", \"scale\", \"tail\.\*\"\]"
    with pytest.raises(ConfigError, match=says):  # no pattern that fits a weight of the model too
        plan(folder, layout, wanted, whose="config.json")
