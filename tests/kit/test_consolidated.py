"""`checkpoint.format` on one process: what is in the files, what they cost, and what is said of damaged ones."""

from __future__ import annotations

import itertools
import json
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import tiny_models
from forge_cli import forge
from forge_train import ConfigError, ForgeError
from forge_train.checkpoint import checkpoint
from forge_train.checkpoint.seal import ALONE
from forge_train.checkpoint.writing import stage
from forge_train.store.index import read_index
from forge_train.store.shards import Shard
from forge_train_kit import full_tensors
from forge_train_kit.full_tensors import INDEX, Files, files_of
from forge_train_kit.stores.copies import Sender, Sent
from forge_train_kit.stores.store import Store
from forge_train_tools.offline.differences import compare
from forge_train_tools.offline.examine import examine
from full_disk import full_for
from saving import save_step
from tiny_models import flip, reseal

pytestmark = [pytest.mark.unit]

MODEL = {
    "layers.0.w": torch.randn(7, 5),
    "layers.1.w": torch.randn(7, 5),
    "half": torch.arange(12.0).bfloat16(),
    "byte": torch.randn(6).to(torch.float8_e4m3fn),
    "count": torch.tensor(3),
    "mask": torch.tensor([True, False, True]),
    "empty": torch.empty(0, 3),
    "wave": torch.randn(3, dtype=torch.complex64),
}
STATE: dict[str, Any] = {"model": MODEL, "optimizer": {"m": torch.ones(9)}, "progress": {"step": 1, "tokens": 0}}


def save(folder: Path, form: Any, state: dict[str, Any] = STATE) -> Path:
    return save_step(folder, 1, state, ALONE, beside=[], form=form).path


def tensors(path: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(path.glob("model-*.safetensors")):
        found |= load_file(file)
    return found


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("form", ["sharded", "safetensors", "both"])
def test_every_format_gives_back_what_was_saved(tmp_path: Path, form: str) -> None:
    path = save(tmp_path, form)
    assert examine(path).problem == ""
    held = checkpoint.load(path, {}, ALONE)["model"]
    assert all(same(held[name], tensor) and held[name].shape == tensor.shape for name, tensor in MODEL.items())
    assert compare(path, save(tmp_path / "sharded", "sharded")).tensors == ()
    if form == "sharded":
        assert not list(path.glob("model*"))
        return
    full = tensors(path)
    assert full.keys() == MODEL.keys() - {"wave"}, "safetensors has no complex numbers, which stay in shards"
    assert all(same(full[name], MODEL[name]) and full[name].shape == MODEL[name].shape for name in full)
    manifest = json.loads((path / "manifest.json").read_text())["files"]
    assert {INDEX, "model-00001-of-00001.safetensors"} <= manifest.keys()
    values = sum(tensor.nbytes for tensor in full.values())
    shards = sum(file.stat().st_size for file in path.glob("rank-*.safetensors"))
    assert (shards > values + 4096) == (form == "both")


def test_files_are_cut_at_a_size_and_indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_tensors, "SHARD_BYTES", 150)
    path = save(tmp_path, "safetensors")
    index = json.loads((path / INDEX).read_text())
    files = sorted(path.glob("model-*.safetensors"))
    assert [file.name for file in files] == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    for file in files:
        held = load_file(file)
        assert {name for name, where in index["weight_map"].items() if where == file.name} == held.keys()
        assert sum(tensor.nbytes for tensor in held.values()) <= 150
        size = struct.unpack("<Q", file.read_bytes()[:8])[0]
        assert (size + 8) % 4096 == 0, "the values begin at a page of their own"
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors(path).values())
    held = checkpoint.load(path, {}, ALONE)["model"]
    assert all(same(held[name], tensor) for name, tensor in MODEL.items())


def boxes(shape: tuple[int, ...], draw: random.Random) -> Iterator[tuple[tuple[int, int], ...]]:
    """A tensor cut into shards along any of its dimensions."""
    cuts = [sorted({0, size, *(draw.randrange(size + 1) for _ in range(draw.randrange(3)))}) for size in shape]
    return itertools.product(*(itertools.pairwise(cut) for cut in cuts))


@pytest.mark.parametrize("seed", range(20))
def test_shards_of_any_cut_make_the_full_tensor(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    whole = {
        f"model.{n}": torch.randn([draw.randrange(1, 6) for _ in range(draw.randrange(4))]).to(dtype)
        for n, dtype in enumerate([torch.float32, torch.bfloat16, torch.float64, torch.float32])
    }
    files = Files.of({name: (tuple(one.shape), one.dtype) for name, one in whole.items()}, alone=True)
    files.create(tmp_path)
    shards = [
        Shard(name, box, tuple(one.shape), one.dtype)
        for name, one in whole.items()
        for box in boxes(tuple(one.shape), draw)
    ]
    draw.shuffle(shards)

    def values(shard: Shard) -> Tensor:
        return whole[shard.name][tuple(slice(low, high) for low, high in shard.box)]

    middle = len(shards) // 2
    files.write(tmp_path, shards[:middle], values)
    files.write(tmp_path, shards[middle:], values)
    found = tensors(tmp_path)
    assert all(same(found[name.removeprefix("model.")], one) for name, one in whole.items())


# -- what it takes ------------------------------------------------------------------------------------------------


def test_the_room_that_is_asked_for_has_the_full_tensors(tmp_path: Path) -> None:
    state = {"model": {"w": torch.zeros(1000, 1000)}, "optimizer": {"m": torch.zeros(1000, 1000)}}
    needed = {form: stage(tmp_path / "x", 1, state, ALONE, files=files_of(form)).shards.plan.bytes for form in FORMS}
    assert needed["both"] - needed["sharded"] == pytest.approx(4_000_000, rel=0.01)
    assert needed["safetensors"] == pytest.approx(needed["sharded"], rel=0.01)
    for form, size in needed.items():
        saved = save_step(tmp_path / form, 1, state, ALONE, beside=[], form=form)
        assert saved.bytes == pytest.approx(size, rel=0.01)


FORMS: tuple[Any, ...] = ("sharded", "safetensors", "both")


@pytest.mark.parametrize("ending", [".safetensors", INDEX])
@pytest.mark.parametrize("form", ["safetensors", "both"])
def test_a_disk_that_refuses_them(tmp_path: Path, form: str, ending: str) -> None:
    with full_for(ending, below=".partial"), pytest.raises(ForgeError, match="can't save the checkpoint: No space"):
        save(tmp_path, form)
    assert list(tmp_path.iterdir()) == []


# -- damage and lies ----------------------------------------------------------------------------------------------


def weights(path: Path) -> Path:
    return next(path.glob("model-*.safetensors"))


@pytest.mark.parametrize("form", ["safetensors", "both"])
def test_a_flipped_bit_is_named(tmp_path: Path, form: str) -> None:
    path = save(tmp_path, form)
    flip(weights(path))
    assert examine(path).problem == f"{weights(path).name} has other contents than were saved"


def rewrite(file: Path, change: Any) -> None:
    """Another header for the same values."""
    data = file.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    table = json.loads(data[8 : 8 + size])
    change(table)
    text = json.dumps(table).encode()
    file.write_bytes(struct.pack("<Q", size) + text + b" " * (size - len(text)) + data[8 + size :])


LIES: dict[str, tuple[Any, str]] = {
    "another shape": (
        lambda t: t["layers.0.w"].update(shape=[5, 7]),
        "it is 5 × 7 of F32 at byte 4,104, and 7 × 5 of F32 at byte 4,104 by",
    ),
    "another dtype": (
        lambda t: t["layers.0.w"].update(dtype="I32"),
        "it is 7 × 5 of I32 at byte 4,104, and 7 × 5 of F32 at byte 4,104 by",
    ),
    "a dtype that nobody knows": (
        lambda t: t["layers.0.w"].update(dtype="U32"),
        "it is 7 × 5 of U32 at byte 4,104, and 7 × 5 of F32",
    ),
    "a tensor that is gone": (
        lambda t: t.update(x=t.pop("layers.0.w")),
        "'layers.0.w' can't be read: it is not in this file",
    ),
    "another place": (
        lambda t: t.update({"layers.0.w": t["layers.1.w"], "layers.1.w": t["layers.0.w"]}),
        "it is 7 × 5 of F32 at byte 4,244, and 7 × 5 of F32 at byte 4,104 by the index",
    ),
    "values beyond the end": (lambda t: t["mask"].update(data_offsets=[0, 10**15]), "not a whole safetensors file: "),
}


@pytest.mark.parametrize("name", LIES)
def test_a_header_that_lies(tmp_path: Path, name: str) -> None:
    change, says = LIES[name]
    path = save(tmp_path, "safetensors")
    rewrite(weights(path), change)
    reseal(path)
    assert says in examine(path).problem
    with pytest.raises(ConfigError) as caught:
        checkpoint.load(checkpoint.resolve(path), {}, ALONE)
    assert says in str(caught.value)
    assert str(weights(path)) in str(caught.value)


@pytest.mark.parametrize("start", [b"\xff" * 8, struct.pack("<Q", 1 << 40), b""], ids=["endless", "huge", "nothing"])
def test_a_header_of_any_size(tmp_path: Path, start: bytes) -> None:
    path = save(tmp_path, "safetensors")
    weights(path).write_bytes((start + weights(path).read_bytes()[8:]) if start else b"")
    reseal(path)
    with pytest.raises(ConfigError, match="not a whole safetensors file|has a shard of .* end at byte"):
        checkpoint.load(checkpoint.resolve(path), {}, ALONE)
    assert examine(path).problem


# -- what reads checkpoints ---------------------------------------------------------------------------------------


def test_copies_hold_them_too(tmp_path: Path) -> None:
    path = save(tmp_path / "run" / "checkpoints", "safetensors")
    store = Store(f"file://{tmp_path}/away")
    told: list[Sent] = []
    sender = Sender(path.parent, [store], 1, 0, tell=told.append)
    sender.send()
    sender.wait()
    assert [sent.problem for sent in told] == [""]
    (stored,) = store.found()
    assert weights(path).name in stored.files
    fetched = store.fetch(stored, tmp_path / "back")
    assert examine(fetched).problem == ""
    assert tensors(fetched).keys() == tensors(path).keys()


@pytest.mark.slow
def test_commands_say_the_same_of_either_format(tmp_path: Path) -> None:
    forms = ("sharded", "safetensors")
    runs = {form: tiny_models.trained(tmp_path, f"checkpoint.format={form}", f"run.name={form}") for form in forms}
    here, there = (runs[form] / "checkpoints" / "step-00000003" for form in forms)
    weights = [entry for name, entry in read_index(there).items() if name.startswith("model.")]
    assert weights
    assert all(shard.file.startswith("model-") for entry in weights for shard in entry.shards)
    differences = compare(here, there)
    assert (differences.tensors, differences.state) == ((), ())

    def said(*command: object) -> str:
        ended = forge(*command)
        assert ended.code == 0, ended.err
        return ended.out

    assert said("checkpoint", "inspect", here).splitlines()[1:] == said("checkpoint", "inspect", there).splitlines()[1:]
    for command in (["generate", "--tokens", "4", "--seed", "1"], ["eval"]):
        assert said(command[0], here, *command[1:]) == said(command[0], there, *command[1:]).replace(
            str(there), str(here)
        )
    exported = {}
    for form, path in (("sharded", here), ("safetensors", there)):
        said("checkpoint", "export", path, tmp_path / f"hf-{form}")
        exported[form] = (tmp_path / f"hf-{form}" / "model.safetensors").read_bytes()
    assert exported["sharded"] == exported["safetensors"]
    assert not list((tmp_path / "hf-sharded").glob("*.index.json"))
    moved = tmp_path / "moved"
    said("checkpoint", "copy", there, moved)
    values = ("-s", f"train.init_from={moved}", "-s", "train.steps=1", "-s", "checkpoint.format=both")
    said("train", there / "config.toml", "--run-dir", tmp_path / "new", "--name", "new", "-q", *values)
    assert examine(tmp_path / "new" / "new" / "checkpoints" / "step-00000001").problem == ""
