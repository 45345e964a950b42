"""Weights that fp16 can't hold are refused instead of stored as infinity."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forge_train import ConfigError
from forge_train_tools.offline.hf_files import TensorFiles


def test_numbers_beyond_fp16_are_refused_by_name(tmp_path: Path) -> None:
    files = TensorFiles.of({"head.weight": ((2,), torch.float16)}, 1000)
    files.create(tmp_path)
    files.write(tmp_path, lambda name: torch.tensor([65504.0, float("inf")]))  # infinite before: kept
    with pytest.raises(ConfigError, match="'head.weight' has numbers beyond"):
        files.write(tmp_path, lambda name: torch.tensor([1.0, 7e4]))
