"""Writes a model in Hugging Face layout: tensors in one or several safetensors files, and their index."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge_train.config.toml import Key
from forge_train.contract.job import Job
from forge_train.ground import disk
from forge_train.ground.errors import ConfigError, ForgeError
from forge_train.state_map import Plan
from forge_train.storage.consolidated import SHARD_BYTES, Shapes, cut, header, size_of, write_index
from forge_train.storage.hf_folder import CONFIG, SINGLE, table
from forge_train.storage.seal import sync

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of a `config.json` that come from the tokenizer, or from the model that was imported."""


@dataclass(frozen=True)
class Exchanged:
    """What was imported or exported."""

    path: Path
    parameters: int
    files: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """What the user should know."""


def write_tensors(
    folder: Path, tensors: Shapes, read: Callable[[str], Tensor], *, shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Write tensors, one at a time, into as few files as their sizes allow, and flush them.

    Args:
        folder: where to; it exists.
        tensors: name → shape, and the dtype to store, in the order in which they are written.
        read: gives a tensor by its name.
        shard_bytes: the most that is put into a file.
    """
    sizes = {name: size_of(*one) for name, one in tensors.items()}
    shards = cut(sizes, shard_bytes)
    files = [
        folder / (SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors")
        for number in range(1, len(shards) + 1)
    ]
    for file, names in zip(files, shards, strict=True):
        _write_file(file, {name: tensors[name] for name in names}, read)
    if len(files) > 1:
        held = {n: file.name for file, names in zip(files, shards, strict=True) for n in names}
        write_index(folder, held, sum(sizes.values()))
    return files


def _write_file(file: Path, tensors: Shapes, read: Callable[[str], Tensor]) -> None:
    """The library's own writer wants all tensors at once."""
    with file.open("wb") as out:
        out.write(header(tensors))
        for name, (shape, dtype) in tensors.items():
            tensor = read(name).to(dtype).contiguous()
            if tuple(tensor.shape) != shape:
                raise ForgeError(f"{name!r} was made with shape {[*tensor.shape]}, and {[*shape]} was planned.")
            out.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            del tensor  # before the next one is read
        out.flush()
        os.fsync(out.fileno())


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """A new folder that gets its name once it is whole. What failed or was killed leaves nothing under that name.

    Args:
        target: a folder that is not there yet, or empty.

    Raises:
        ConfigError: if the target is in use.
        ForgeError: if the disk refuses.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not empty; name a new folder.")
    part = target.with_name(f".{target.name}.partial")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        yield part
        sync(part)
        part.replace(target)
        sync(target.parent)
    except OSError as error:
        raise disk.refused(target, error, "can't be written:") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def in_order(plan: Plan, dtype: torch.dtype | None) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The tensors of a plan, group by group, and the dtype to store each in: the one that was asked for, or its own.
    What is no floating-point number keeps its dtype."""
    views = {name: plan.targets[name] for group in plan.groups for name in group.targets}
    return {n: (v.shape, dtype if dtype and v.dtype.is_floating_point else v.dtype) for n, v in views.items()}


def put_beside(folder: Path, beside: Mapping[str, Path]) -> None:
    """Copy files of a model into its folder, all but its `config.json`."""
    for name, file in beside.items():
        if name != CONFIG:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, folder / name)


def common_dtype(tensors: Shapes) -> str:
    """The dtype that most bytes of a model's tensors have, as a `config.json` names it."""
    held: Counter[torch.dtype] = Counter()
    for shape, dtype in tensors.values():
        held[dtype] += size_of(shape, dtype)
    return str(held.most_common(1)[0][0] if held else torch.float32).removeprefix("torch.")


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


def special_tokens(beside: Mapping[str, Path], job: Job) -> dict[str, Any]:
    """The ids of special tokens for `config.json`: as the imported model had them, else the tokenizer's."""
    if CONFIG in beside:
        own = table(beside[CONFIG])
        return {key: own[key] for key in SPECIAL if key in own}
    if not job.hooks.provider("tokenizer"):
        return {}
    tokenizer = job.hooks.tokenizer()
    begin = tokenizer.begin[0] if len(tokenizer.begin) == 1 else None
    stops = [*tokenizer.stops] if len(tokenizer.stops) > 1 else tokenizer.end
    return {"bos_token_id": begin, "eos_token_id": stops, "pad_token_id": None}
