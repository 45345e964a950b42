"""Writes a model in Hugging Face layout: tensors in one or several safetensors files, and their index."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from forge_train.config.toml import Key
from forge_train.storage.consolidated import SHARD_BYTES, cut, header, size_of, write_index
from forge_train.storage.hf_folder import SINGLE


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
    shards = cut({name: size_of(shape, dtype) for name, shape in shapes.items()}, shard_bytes)
    files = [
        folder / (SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors")
        for number in range(1, len(shards) + 1)
    ]
    for file, names in zip(files, shards, strict=True):
        _write_file(file, {name: shapes[name] for name in names}, dtype, read)
    if len(files) > 1:
        total = sum(size_of(shape, dtype) for shape in shapes.values())
        write_index(folder, {n: file.name for file, names in zip(files, shards, strict=True) for n in names}, total)
    return files


def _write_file(
    file: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, read: Callable[[str], Tensor]
) -> None:
    """The library's own writer wants all tensors at once."""
    with file.open("wb") as out:
        out.write(header({name: (shape, dtype) for name, shape in shapes.items()}))
        for name in shapes:
            tensor = read(name).to(dtype).contiguous()
            out.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


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
