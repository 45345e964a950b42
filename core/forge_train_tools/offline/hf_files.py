"""Writes a model in Hugging Face layout: tensors in one or several safetensors files, and their index."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge_train.base.errors import ConfigError, ForgeError
from forge_train.base.files import check_new, refused
from forge_train.checkpoint.seal import sync
from forge_train.config.tree import Key
from forge_train.plugin.job import Job
from forge_train.store.manifest import hasher
from forge_train.store.shards import size_of
from forge_train.store.tensor_files import Place, Shapes, as_bytes, exact_bytes, header, write_at
from forge_train_kit import hookspecs
from forge_train_kit.full_tensors import Files, cut, write_index
from forge_train_kit.hf import HFModel
from forge_train_kit.hf.folder import CONFIG, SINGLE, table
from forge_train_kit.new_folder import claimed
from forge_train_kit.state_map import Plan

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of a `config.json` that come from the tokenizer or from the imported model."""


@dataclass(frozen=True)
class Exchanged:
    """The result of an import or export."""

    path: Path
    parameters: int
    files: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """Remarks for the user."""
    data: str = ""
    """The option for the data to train an imported model on."""


def check_range(name: str, stored: Tensor, original: Callable[[], Tensor]) -> None:
    """Refuse fp16 if it turns finite numbers into infinities.

    Args:
        name: of the tensor.
        stored: in the requested dtype.
        original: returns the original values, if they are needed.

    Raises:
        ConfigError: naming the tensor.
    """
    if stored.dtype != torch.float16:
        return
    infinite = stored.isinf()
    if bool(infinite.any()) and bool((infinite & original().isfinite()).any()):
        raise ConfigError(f"--dtype fp16: {name!r} has numbers beyond ±65504, which fp16 can't hold; use bf16.")


@dataclass(frozen=True)
class TensorFiles:
    """The safetensors files to write for a model. The writer of `safetensors` needs all tensors at once."""

    tensors: Shapes
    """Name → shape and stored dtype, in the order of the file."""
    files: Mapping[str, tuple[str, ...]]
    """File → its tensors."""

    @classmethod
    def of(cls, tensors: Shapes, shard_bytes: int) -> TensorFiles:
        """As few files as possible, each of at most `shard_bytes` unless a single tensor is larger."""
        shards = cut({name: size_of(*one) for name, one in tensors.items()}, shard_bytes)
        count = len(shards)
        names = [SINGLE] if count == 1 else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
        return cls(tensors, dict(zip(names, map(tuple, shards), strict=True)))

    def create(self, folder: Path) -> None:
        """Write the index, and each file with its header and space for its tensors, before any process fills it."""
        for file, names in self.files.items():
            head = header({name: self.tensors[name] for name in names})
            with (folder / file).open("wb") as out:
                out.write(head)
                out.truncate(len(head) + sum(size_of(*self.tensors[name]) for name in names))
        if len(self.files) > 1:
            total = sum(size_of(*one) for one in self.tensors.values())
            write_index(folder, {name: file for file, names in self.files.items() for name in names}, total)

    def write(self, folder: Path, read: Callable[[str], Tensor], *, rank: int = 0, world: int = 1) -> None:
        """Write one rank's share of the tensors to their places, one at a time, and flush them.

        Args:
            folder: the folder of the files that `create` made.
            read: returns a tensor by its name.
            rank: number of the share; all shares have about the same number of bytes.
            world: number of shares.
        """
        headers = {file: header({name: self.tensors[name] for name in names}) for file, names in self.files.items()}
        places: dict[str, Place] = {}
        for file, names in self.files.items():
            begins = len(headers[file])
            for name in names:
                places[name] = Place(file, begins, *self.tensors[name])
                begins += places[name].bytes
        fill(folder, headers, places, lambda name: self._bytes(name, read), rank=rank, world=world)

    def _bytes(self, name: str, read: Callable[[str], Tensor]) -> memoryview:
        shape, dtype = self.tensors[name]
        tensor = read(name)
        if tuple(tensor.shape) != shape:
            raise ForgeError(f"{name!r} has shape {[*tensor.shape]}, but {[*shape]} was expected.")
        stored = tensor.to(dtype)
        check_range(name, stored, lambda: tensor)
        return as_bytes(stored)


def fill(
    folder: Path,
    headers: Mapping[str, bytes],
    places: Mapping[str, Place],
    values: Callable[[str], memoryview],
    *,
    rank: int = 0,
    world: int = 1,
    hashed: bool = False,
) -> dict[str, str]:
    """Write one share of full tensors into files that are there with their headers, one at a time, and flush them.

    Args:
        folder: of the files.
        headers: file → what it begins with.
        places: tensor → place, in the order of the files and of the bytes in them.
        values: gives the bytes of a tensor.
        rank: number of the share; all shares have about the same number of bytes, and each tensor is in one.
        world: number of shares.
        hashed: whether to hash the files on their way.

    Returns:
        The hashes of the files, where they were asked for and there is one share.
    """
    total, begins = sum(place.bytes for place in places.values()), 0
    hashes: dict[str, str] = {}
    for file, head in headers.items():
        handle, found = os.open(folder / file, os.O_WRONLY), hasher() if hashed and world == 1 else None
        if found:
            found.update(memoryview(head))
        try:
            for name in (name for name, place in places.items() if place.file == file):
                size = places[name].bytes
                if min((begins + size // 2) * world // max(total, 1), world - 1) == rank:
                    write_at(handle, values(name), places[name].start, found)
                begins += size
            os.fsync(handle)
        finally:
            os.close(handle)
        if found:
            hashes[file] = found.hexdigest()
    return hashes


def fill_full(
    folder: Path, files: Files, values: Callable[[str], Tensor], *, rank: int = 0, world: int = 1
) -> dict[str, str]:
    """Write one share of a checkpoint's full tensors into the files that `files.create` made; see `fill`.

    Args:
        folder: of the files.
        files: the files.
        values: gives a tensor by its name in the checkpoint.
        rank: number of the share.
        world: number of shares.
    """

    def data(name: str) -> memoryview:
        return exact_bytes(values(name), name, files.places[name].shape, files.places[name].dtype)

    return fill(folder, files.headers, files.places, data, rank=rank, world=world, hashed=True)


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """A new folder that gets its name once it is complete. A failed or killed write leaves nothing under that name.

    Args:
        target: a folder that doesn't exist yet, an empty one, or a link to an empty one.

    Raises:
        ConfigError: if the target is in use, or another process is writing it.
        ForgeError: if the disk reports an error.
    """
    try:
        with claimed(target) as folder:
            part = folder.with_name(f".{folder.name}.partial")
            shutil.rmtree(part, ignore_errors=True)
            try:
                part.mkdir()
                yield part
                sync(part)
                check_new(target)
                part.replace(folder)
                sync(folder.parent)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise refused(target, error, "can't be written:") from error


def in_order(plan: Plan, dtype: torch.dtype | None, exact: Iterable[str] = ()) -> Shapes:
    """The tensors of a plan, group by group, and the dtype to store each in: the requested one, or its own.
    Tensors that are not floating-point keep their dtype, and so do names that match one of the patterns `exact`."""
    views = {name: plan.targets[name] for group in plan.groups for name in group.targets}
    kept = {name for name in views if any(re.fullmatch(one, name) for one in exact)}
    cast = {name for name, view in views.items() if dtype and view.dtype.is_floating_point and name not in kept}
    return {name: (view.shape, dtype if dtype and name in cast else view.dtype) for name, view in views.items()}


def put_beside(folder: Path, beside: Mapping[str, Path]) -> None:
    """Copy a model's files into its folder, except its `config.json`."""
    for name, file in beside.items():
        if name != CONFIG:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, folder / name)


def common_dtype(tensors: Shapes) -> str:
    """The dtype of most bytes of a model's tensors, as named in a `config.json`."""
    held: Counter[torch.dtype] = Counter()
    for shape, dtype in tensors.values():
        held[dtype] += size_of(shape, dtype)
    return str(held.most_common(1)[0][0] if held else torch.float32).removeprefix("torch.")


def comments_in(preset: Path) -> dict[Key, str]:
    """The comments next to the keys of a preset's sections."""
    import tomlkit

    tables = {name: table for name, table in tomlkit.parse(preset.read_text(encoding="utf-8")).items() if table}
    return {
        (name, key): comment
        for name, table in tables.items()
        for key in table
        if (comment := table[key].trivia.comment.lstrip("# "))
    }


def described(layout: HFModel, special: Mapping[str, Any]) -> dict[str, Any]:
    """The `config.json` of a model, with these ids of special tokens where the layout has none."""
    own = {key: value for key, value in layout.config.items() if value is not None or special.get(key) is None}
    return {**special, **own}


def special_tokens(beside: Mapping[str, Path], job: Job) -> dict[str, Any]:
    """The ids of special tokens for `config.json`: those of the imported model, or else the tokenizer's."""
    if CONFIG in beside:
        own = table(beside[CONFIG])
        return {key: own[key] for key in SPECIAL if key in own}
    if not job.hooks.provider("tokenizer"):
        return {}
    tokenizer = hookspecs.tokenizer(job)
    begin = tokenizer.begin[0] if len(tokenizer.begin) == 1 else None
    stops = [*tokenizer.stops] if len(tokenizer.stops) > 1 else tokenizer.end
    return {"bos_token_id": begin, "eos_token_id": stops, "pad_token_id": None}
