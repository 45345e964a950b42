"""Checkpoints: one fresh folder per step, whole or invisible, verified before it replaces anything.

It holds tensors (safetensors files and their index), `state.json` with everything else, the run's `config.toml` and
`plugins.json`, and `manifest.json` with the size and hash of each.
"""

from __future__ import annotations

from pathlib import Path

from ..base.errors import ConfigError
from ..base.format import format_list
from ..mesh.distributed import DistributedContext
from ..store.manifest import DCP_INDEX, MANIFEST, NEEDED
from .found import Saved as Saved  # noqa: PLC0414  # what this module offers too
from .found import found as found  # noqa: PLC0414
from .found import newest as newest  # noqa: PLC0414
from .found import remove as remove  # noqa: PLC0414
from .reading import load as load  # noqa: PLC0414
from .reading import read_state as read_state  # noqa: PLC0414
from .reading import shapes as shapes  # noqa: PLC0414
from .reading import unusable
from .seal import ALONE, verify
from .seal import check as check  # noqa: PLC0414
from .writing import prune as prune  # noqa: PLC0414
from .writing import write as write  # noqa: PLC0414


def resolve(path: Path, dist: DistributedContext = ALONE) -> Path:
    """The checkpoint that a path means: itself, or a run's newest whole one. Every file of it was read.

    Args:
        path: a run, or a checkpoint.
        dist: the processes that read it together, all of which call this.

    Raises:
        ConfigError: if there is none there.
    """
    if dist.on_main(lambda: _is_run(path)):
        saved = newest(path / "checkpoints", dist)
        if saved is None:
            raise ConfigError(f"{path}: this run has no whole checkpoint.")
        return saved.path
    if problem := verify(path, dist):
        raise unusable(path, problem)
    return path


def _is_run(path: Path) -> bool:
    """Return True for a run, False for a checkpoint, complete or not. Any other path is an error."""
    if (path / "checkpoints").is_dir():
        return True
    if not path.is_dir():
        what = "not a run or a checkpoint" if path.exists() else "there is no such run or checkpoint"
        raise ConfigError(f"{path}: {what}.{advice(path)}")
    if (path / "config.json").is_file() and not (path / MANIFEST).is_file():
        raise ConfigError(
            f"{path} is in Hugging Face layout. Make a checkpoint of it first: forge checkpoint import {path} NEW"
        )
    if (path / DCP_INDEX).is_file() and not (path / MANIFEST).is_file():
        raise ConfigError(
            f"{path} was written by torch.distributed.checkpoint. Import it first: forge checkpoint import {path} NEW"
        )
    if not any((path / name).exists() for name in (MANIFEST, *NEEDED)):
        raise ConfigError(f"{path} is neither a run nor a checkpoint.{advice(path)}")
    return False


_OTHERS = (
    (
        ".metadata",
        "It is an index of torch.distributed.checkpoint; import the folder first: forge checkpoint import FOLDER NEW",
    ),
    (
        "adapter_config.json",
        "It holds an adapter of PEFT, not a model; name the folder of its model, or merge the two first.",
    ),
    ("*.gguf", "GGUF files are not read; take the safetensors files that they were made from."),
    (
        "*.bin *.pt *.pth *.ckpt *.pkl",
        "Pickled weights are never read; save the model with transformers, which writes safetensors files.",
    ),
    (
        "*.npy */*.npy *.npz",
        "Raw arrays are not read; take the model in Hugging Face layout, or convert it with OLMo's scripts.",
    ),
    (
        "*.h5 *.msgpack *.onnx onnx/*.onnx *.tflite *.mlmodel",
        "Weights in this format are not read; save the model with transformers, which writes safetensors files.",
    ),
    ("snapshots/*/config.json", "It is a folder of the Hugging Face cache; name the folder of this file."),
    ("*/config.json", "Name the folder of this file."),
    (
        "*.safetensors",
        "Only safetensors files of these names are read: model.safetensors, or those of an index, with a config.json.",
    ),
)
"""Patterns of files, and advice on each."""


def advice(path: Path) -> str:
    """A sentence about a path that is no model, to put after what is missing; empty if nothing is known.

    Args:
        path: a folder, or a file that was named instead of one.
    """
    if path.suffix == ".safetensors" and path.is_file():
        return f" It is a file of weights; name its folder, {path.parent}."
    for patterns, text in _OTHERS:
        if path.is_file():
            if any(path.match(pattern) for pattern in patterns.split()):
                return f" {text}"
        elif found := sorted({str(file.relative_to(path)) for one in patterns.split() for file in path.glob(one)}):
            return f" There is {format_list(found, 3)}. {text}"
    return ""
