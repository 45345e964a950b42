"""What ranks do for test_import_layouts.py: start from a folder in Hugging Face layout, and count what each reads."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor

from forge_train_kit.hf.folder import Folder
from forge_train_kit.hf.ranges import Weights
from forge_train_tools.testing import run_forge
from muon_cases import Begun


def started(folder: str, source: str, plugins: Sequence[str], config: Mapping[str, Any]) -> dict[str, Any]:
    """Take one step from weights, without a change to them."""
    read, sizes = Folder.read, []

    def counted(self: Folder, *arguments: Any) -> Tensor:
        sizes.append((part := read(self, *arguments)).nbytes)
        return part

    settings = {"train.init_from": source, "train.micro_batch": 1, "train.global_batch": 4, **config}

    def counted_of_checkpoint(self: Weights, *arguments: Any) -> Tensor:
        sizes.append((part := read_of_checkpoint(self, *arguments)).nbytes)
        return part

    read_of_checkpoint = Weights.read
    with patch.object(Folder, "read", counted), patch.object(Weights, "read", counted_of_checkpoint):
        run = run_forge((*plugins, Begun), settings, steps=1, folder=Path(folder))
    weights: dict[str, Tensor] = run.plugin("begun").weights
    return {
        "read": sum(sizes),
        "before": {name: _hash(tensor) for name, tensor in weights.items()},
        "loss": run.losses[0],
        "run": str(run.run),
    }


def _hash(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
