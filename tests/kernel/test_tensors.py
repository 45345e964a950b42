"""Tensors are read range by range from shards of any cut: only the bytes that are asked for, to the bit."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forge_train import ConfigError, ForgeError
from forge_train.checkpoint.seal import ALONE
from forge_train.store import tensors
from forge_train.store.index import Placed, entries_of, read_index, write_index
from forge_train.store.shards import Box, Shard, whole
from forge_train.store.tensor_files import file_of, write_shards
from forge_train_kit.full_tensors import Files
from forge_train_tools.offline.hf_files import fill_full

pytestmark = pytest.mark.unit

DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.uint8, torch.int64, torch.bool),
    *(torch.complex64, torch.complex128, torch.uint64),
)


def cut(shape: tuple[int, ...], draw: random.Random) -> list[Box]:
    cuts = [sorted({0, size, *(draw.randrange(size + 1) for _ in range(draw.randrange(3)))}) for size in shape]
    return list(itertools.product(*(itertools.pairwise(one) for one in cuts)))


def write(folder: Path, held: dict[str, Tensor], draw: random.Random, files: int = 3) -> None:
    """A checkpoint's tensors, in shards of any cut, spread over files."""
    shapes = {name: (tuple(one.shape), one.dtype) for name, one in held.items()}
    shards = [Shard(name, box, *one) for name, one in shapes.items() for box in cut(one[0], draw)]
    draw.shuffle(shards)
    placed = []
    for number in range(files):
        mine = shards[number::files]
        places, _ = write_shards(folder / file_of(number, 0), mine, lambda shard: part(held[shard.name], shard.box))
        placed += [(shard.name, place) for shard, place in zip(mine, places, strict=True)]
    write_index(folder, entries_of(shapes, placed))


def part(tensor: Tensor, box: Box) -> Tensor:
    return tensor[tuple(slice(low, high) for low, high in box)]


def same(a: Tensor, b: Tensor) -> bool:
    values = [one.contiguous().reshape(-1).view(torch.uint8) for one in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*values)


def drawn(draw: random.Random) -> dict[str, Tensor]:
    made = {}
    for number, dtype in enumerate(DTYPES):
        shape = [draw.randrange(1, 7) for _ in range(draw.randrange(4))]
        size = dtype.itemsize * torch.Size(shape).numel()
        values = [draw.randrange(2 if dtype == torch.bool else 256) for _ in range(size)]
        made[f"model.{number}"] = torch.tensor(values, dtype=torch.uint8).view(dtype).reshape(shape)
    return made | {"model.empty": torch.empty(3, 0), "model.number": torch.tensor(7)}


@pytest.mark.parametrize("seed", range(15))
def test_any_range_of_any_cut(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    held = drawn(draw)
    write(tmp_path, held, draw)
    tensors.check_shards(tmp_path)
    assert read_index(tmp_path).keys() == held.keys()
    for name, tensor in held.items():
        assert same(tensors.read_range(tmp_path, name, whole(tuple(tensor.shape))), tensor)
        bounds = [sorted(draw.randrange(size + 1) for _ in range(2)) for size in tensor.shape]
        box = tuple((low, high) for low, high in bounds)
        assert same(tensors.read_range(tmp_path, name, box), part(tensor, box))
    into = {name: torch.empty_like(tensor) for name, tensor in held.items()}
    tensors.read(tmp_path, into, ALONE)
    assert all(same(into[name], tensor) for name, tensor in held.items())


def test_targets_of_another_order_or_dtype_are_filled_too(tmp_path: Path) -> None:
    held = {"w": torch.arange(24.0).reshape(4, 6)}
    write(tmp_path, held, random.Random(3))
    for target in (torch.zeros(6, 4).t(), torch.zeros(4, 6, dtype=torch.bfloat16), torch.zeros(4, 12)[:, ::2]):
        tensors.read(tmp_path, {"w": target}, ALONE)
        assert torch.equal(target.float(), held["w"])
    parameter = torch.nn.Parameter(torch.zeros(4, 6))
    tensors.read(tmp_path, {"w": parameter}, ALONE)
    assert torch.equal(parameter, held["w"])
    with pytest.raises(ConfigError, match=r"'w' has the shape \[4, 6\] there, and \[6, 4\] here"):
        tensors.read(tmp_path, {"w": torch.zeros(6, 4)}, ALONE)


def test_only_the_bytes_of_a_range_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"w": torch.arange(10_000.0).reshape(100, 100)}, random.Random(1))
    read: list[int] = []
    real = os.preadv

    def counted(handle: int, buffers: list[memoryview], offset: int) -> int:
        read.append(got := real(handle, buffers, offset))
        return got

    monkeypatch.setattr(os, "preadv", counted)
    tensors.read_range(tmp_path, "w", ((10, 30), (5, 9)))
    assert sum(read) == 20 * 4 * 4


def test_each_header_is_read_once_however_many_files_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = {f"{n}": torch.arange(200.0) for n in range(3)}
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = dict.fromkeys(held, ((200,), torch.float32))
    placed: list[tuple[str, Placed]] = []
    for rank in range(100):
        shards = [Shard(name, ((2 * rank, 2 * rank + 2),), *shapes[name]) for name in held]
        places, _ = write_shards(tmp_path / file_of(rank, 0), shards, lambda shard: part(held[shard.name], shard.box))
        placed += zip(held, places, strict=True)
    write_index(tmp_path, entries_of(shapes, placed))
    headers: list[Path] = []
    indexes: list[Path] = []
    real_header, real_index = tensors.described, tensors.read_index
    monkeypatch.setattr(tensors, "described", lambda file: headers.append(file) or real_header(file))
    monkeypatch.setattr(tensors, "read_index", lambda path: indexes.append(path) or real_index(path))
    for name, tensor in held.items():
        assert same(tensors.read_range(tmp_path, name, ((0, 200),)), tensor)
    assert (len(headers), len(indexes)) == (100, 3)
    last = tmp_path / file_of(99, 0)
    os.utime(last, ns=(0, 0))
    tensors.check_shards(tmp_path)
    assert headers[100:] == [last]


@pytest.mark.parametrize("values", [torch.zeros(3), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32)])
def test_values_of_another_shape_or_dtype_are_not_written(tmp_path: Path, values: Tensor) -> None:
    shard = Shard("w", ((0, 4),), (4,), torch.float32)
    said = rf"'w' can't be written: it is \[.*\] of {values.dtype}, and \[4\] of torch.float32 was declared"
    with pytest.raises(ForgeError, match=said):
        write_shards(tmp_path / file_of(0, 0), [shard], lambda _: values)
    files = Files.of({"model.w": ((4,), torch.float32)}, alone=True)
    files.create(tmp_path)
    full = shard._replace(name="model.w")
    with pytest.raises(ForgeError, match=said.replace("w", "model.w", 1)):
        files.write(tmp_path, [full], lambda _: values)
    with pytest.raises(ForgeError, match=said.replace("w", "model.w", 1)):
        fill_full(tmp_path, files, lambda _: values)
