"""Weights that fp16 can't hold are refused instead of stored as infinity."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import chat_model
from forge_train import ConfigError
from forge_train_tools.offline.hf_files import TensorFiles
from forge_train_tools.offline.hf_import import import_checkpoint


def test_numbers_beyond_fp16_are_refused_by_name(tmp_path: Path) -> None:
    files = TensorFiles.of({"head.weight": ((2,), torch.float16)}, 1000)
    files.create(tmp_path)
    files.write(tmp_path, lambda name: torch.tensor([65504.0, float("inf")]))  # infinite before: kept
    with pytest.raises(ConfigError, match="'head.weight' has numbers beyond"):
        files.write(tmp_path, lambda name: torch.tensor([1.0, 7e4]))


def test_so_they_are_on_their_way_in(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    chat_model.write_model(tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    tensors["model.norm.weight"][3] = 7e4
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="'norm.weight' has numbers beyond"):
        import_checkpoint(tmp_path / "hf", tmp_path / "narrow", dtype=torch.float16)
    assert not (tmp_path / "narrow").exists()
