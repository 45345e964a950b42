"""Folders and files that are no runs or checkpoints: what they hold instead, and what to do."""

from __future__ import annotations

from pathlib import Path

from forge_train.base.errors import ConfigError
from forge_train.base.format import format_list
from forge_train.checkpoint import checkpoint
from forge_train.checkpoint.seal import ALONE
from forge_train.mesh.distributed import DistributedContext
from forge_train.store.manifest import DCP_INDEX


def resolve(path: Path, dist: DistributedContext = ALONE) -> Path:
    """Like the function of `forge_train.checkpoint.checkpoint`, and says what a path holds that is no checkpoint.

    Args:
        path: a run, or a checkpoint.
        dist: the processes that read it together, all of which call this.

    Raises:
        ConfigError: if there is none there.
    """
    try:
        return checkpoint.resolve(path, dist)
    except checkpoint.NoCheckpointError as error:
        raise ConfigError(_importable(path) or f"{error}{advice(path)}") from None


def _importable(path: Path) -> str:
    if (path / "config.json").is_file():
        return (
            f"{path} is in Hugging Face layout. Make a checkpoint of it first: forge checkpoint import {path} NEW, "
            "with -p and the plugins of its task if it is no language model"
        )
    if (path / DCP_INDEX).is_file():
        return (
            f"{path} was written by torch.distributed.checkpoint. Import it first: forge checkpoint import {path} NEW"
        )
    return ""


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
