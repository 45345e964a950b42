"""A model in Hugging Face layout, written: tensors in one or several safetensors files, and their index."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge_train.config.toml import Key
from forge_train.storage.hf_folder import DTYPES, INDEX, SINGLE

SHARD_BYTES = 5_000_000_000
"""Largest file that is written, if its tensors are not larger."""


def write_tensors(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    read: Callable[[str], Tensor],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Write tensors, one at a time, into as few files as their sizes allow.

    Args:
        folder: where to; it exists.
        shapes: name → shape, in the order in which they are written.
        dtype: what to store.
        read: gives a tensor by its name.
        shard_bytes: the most that is put into a file.
    """
    shards = _shards({name: _bytes(shape, dtype) for name, shape in shapes.items()}, shard_bytes)
    files = [
        folder / (SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors")
        for number in range(1, len(shards) + 1)
    ]
    for file, names in zip(files, shards, strict=True):
        _write_file(file, {name: shapes[name] for name in names}, dtype, read)
    if len(files) > 1:
        total = sum(_bytes(shape, dtype) for shape in shapes.values())
        where = {name: file.name for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return files


def _shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    room = limit
    for name, size in sizes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size
    return shards


def _write_file(
    file: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, read: Callable[[str], Tensor]
) -> None:
    """The format of https://github.com/huggingface/safetensors#format, whose own writer wants all tensors at once."""
    stored = next(name for name, known in DTYPES.items() if known == dtype)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + _bytes(shape, dtype)
        header[name] = {"dtype": stored, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name in shapes:
            tensor = read(name).to(dtype).contiguous()
            out.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return dtype.itemsize * torch.Size(shape).numel()


def comments_in(preset: Path) -> dict[Key, str]:
    """The comments beside the keys of a preset's sections."""
    import tomlkit

    tables = {name: table for name, table in tomlkit.parse(preset.read_text(encoding="utf-8")).items() if table}
    return {
        (name, key): comment
        for name, table in tables.items()
        for key in table
        if (comment := table[key].trivia.comment.lstrip("# "))
    }
