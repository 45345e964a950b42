"""What ranks do for test_lora_layouts.py: begin updates as singular directions, of which each rank finds its own."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from forge_train.mesh.tensors import local
from forge_train_tools.testing import run_forge


def begun(folder: str, plugins: Sequence[str], config: Mapping[str, Any]) -> dict[str, int]:
    """Take a step where the vectors of the second rank have the other sign; gives the fixed factors that it has whole,
    each by the checksum of its values."""
    svd = torch.linalg.svd

    def flipped(*given: Any, **more: Any) -> Any:
        u, s, v = svd(*given, **more)
        return (-u, s, -v) if dist.get_rank() else (u, s, v)

    with patch("torch.linalg.svd", flipped):
        run = run_forge(("lora", *plugins), config, steps=1, folder=Path(folder))
    return {
        name: zlib.crc32(local(one.detach()).numpy().tobytes())
        for name, one in run.model.named_parameters()
        if name.endswith("_start") and local(one).shape == one.shape
    }
