"""Checkpoints and folders that mean harm: each is refused by name, quickly, in little memory, and runs nothing."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import random
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_train import ConfigError, PluginError
from forge_train.checkpoint import checkpoint
from forge_train.checkpoint.seal import ALONE, check
from forge_train.store import index
from forge_train.store.shards import tiling_problem
from forge_train.store.tensors import check_shards, read_range
from forge_train_kit.data.manifest import read_manifest
from forge_train_kit.hf.folder import Folder
from forge_train_tools.offline.examine import examine
from saving import save_step
from tiny_models import reseal

pytestmark = [pytest.mark.unit]

STATE = {
    "model": {"a": torch.arange(64.0).reshape(8, 8), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.ones(8, 8)},
    "progress": {"step": 1, "tokens": 2},
}
FILE = "rank-00000-0.safetensors"
SECONDS, MEMORY = 10, 256 << 20
"""Far above what a refusal takes, far below what each attack asks for."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save_step(tmp_path / "checkpoints", 1, STATE, ALONE, beside=[]).path


def weights(path: Path) -> Path:
    return next(path.glob("rank-*.safetensors"))


def use(path: Path) -> None:
    """Everything that a command does with a checkpoint's contents."""
    checkpoint.load(checkpoint.resolve(path), {}, ALONE)


def refused(path: Path, use: Callable[[Path], object] = use) -> str:
    """The message; one that is a sentence, and comes before much time or memory is gone."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(ConfigError) as caught:
        use(path)
    assert time.monotonic() - began < SECONDS
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MEMORY
    text = str(caught.value)
    assert str(path) in text
    assert len(text) < 1000
    assert text.endswith(".")
    assert "\n" not in text
    return text


# -- the index ------------------------------------------------------------------------------------


def entry(**changes: object) -> Callable[[Any], object]:
    """An index in which something of one tensor is another thing."""
    return lambda index: index["model.a"].update(changes)


def place(text: str, file: object = FILE, start: object = 4096) -> Callable[[Any], object]:
    return entry(shards={text: [file, start]})


def copies(index: Any) -> None:
    """A thousand tensors in the bytes of one."""
    index.update({f"model.{number}": index["model.a"] for number in range(1000)})


def swapped(index: Any) -> None:
    """Each in the place of the other."""
    a, b = index["model.a"], index["model.c"]
    a["shards"], b["shards"] = b["shards"], a["shards"]


INDEXES: dict[str, tuple[Callable[[Any], object], str]] = {
    "a huge tensor": (
        entry(shape=[1 << 40, 1 << 20], shards={f"[0:{1 << 40},0:{1 << 20}]": [FILE, 4096]}),
        "has a shard of 'model.a' end at byte 4,611,686,018,427,392,000 of 'rank-00000-0.safetensors', which has ",
    ),
    "a tensor larger than its shards": (entry(shape=[1 << 40, 8]), "shards that do not add up to the tensor: 'model.a"),
    "a shard outside": (place("[8:16,0:8]"), "declares a shard that does not lie in the tensor: 'model.a'"),
    "a shard of nothing": (place("[0:0,0:8]"), "declares a shard that does not lie in the tensor: 'model.a'"),
    "shards that overlap": (
        entry(shards={"[0:4,0:8]": [FILE, 4096], "[2:6,0:8]": ["rank-00000-0.safetensors", 4224]}),
        "declares shards that overlap: 'model.a'",
    ),
    "a shard left out": (place("[0:4,0:8]"), "declares shards that do not add up to the tensor: 'model.a'"),
    "no shards": (entry(shards={}), "declares shards that do not add up to the tensor: 'model.a'"),
    "a thousand tensors in one place": (copies, "has two shards at byte 4,096 of 'rank-00000-0.safetensors'"),
    "a place beyond the file": (
        place("[0:8,0:8]", start=1 << 50),
        "has a shard of 'model.a' end at byte 1,125,899,906,842,880 of 'rank-00000-0.safetensors', which has",
    ),
    "a number that is too large": (place("[0:8,0:8]", start=1 << 70), "1180591620717411303424 is no size"),
    "a negative place": (place("[0:8,0:8]", start=-1), "-1 is no size"),
    "a truth for a place": (place("[0:8,0:8]", start=True), "a bool is no size"),
    "a number with a point": (place("[0:8,0:8]", start=4096.0), "a float is no size"),
    "a negative size": (entry(shape=[-8, -8]), "-8 is no size"),
    "a shape beyond all numbers": (
        entry(shape=[1 << 62, 1 << 62, 0], shards={}),
        "'model.a' has the shape [4611686018427387904, 4611686018427387904, 0], which is too large for any tensor",
    ),
    "a hundred dimensions": (entry(shape=[1] * 100), "'model.a' has 100 dimensions"),
    "other dimensions": (place("[0:64]"), "'[0:64]' is no range of 'model.a'"),
    "a range of other text": (place("[ 0:8,0:8]"), "'[ 0:8,0:8]' is no range of 'model.a'"),
    "a range of huge numbers": (place(f"[0:{'9' * 100_000},0:8]"), "not an index of tensors"),
    "a range that is none": (place("rows"), "not an index of tensors"),
    "no dtype": (entry(dtype="Tensor"), "'Tensor' is no dtype"),
    "a dtype that is a module": (entry(dtype="_inductor"), "'_inductor' is no dtype"),
    "a list for a dtype": (entry(dtype=[]), "not an index of tensors"),
    "a list for a file": (place("[0:8,0:8]", file=["a"]), "not an index of tensors"),
    "a list for a tensor": (lambda index: index.update({"model.a": []}), "not an index of tensors"),
    "a file elsewhere": (
        place("[0:8,0:8]", file="/etc/passwd"),
        "names '/etc/passwd', which is no file of tensors in the checkpoint's folder",
    ),
    "a file above": (
        place("[0:8,0:8]", file="../rank-00000-0.safetensors"),
        "names '../rank-00000-0.safetensors', which is no file of tensors in the checkpoint's folder",
    ),
    "a file that is not there": (place("[0:8,0:8]", file="rank-9.safetensors"), "'rank-9.safetensors', which can't be"),
    "a file of no tensors": (place("[0:8,0:8]", file="state.json"), "names 'state.json', which is no file of tensors"),
    "another place": (
        place("[0:8,0:8]", start=4092),
        "'model.a[0:8,0:8]' can't be read: it is 8 × 8 of F32 at byte 4,096, and 8 × 8 of F32 at byte 4,092 by",
    ),
    "the place of another": (swapped, "can't be read: it is 8 × 8 of F32 at byte 4,"),
    "another dtype": (entry(dtype="int32"), "it is 8 × 8 of F32 at byte 4,096, and 8 × 8 of I32 at byte 4,096 by"),
    "another shape": (
        entry(shape=[4, 16], shards={"[0:4,0:16]": [FILE, 4096]}),
        "'model.a[0:4,0:16]' can't be read: it is not in this file",
    ),
}


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_that_lies(path: Path, name: str) -> None:
    index = json.loads((path / "tensors.json").read_text())
    INDEXES[name][0](index)
    (path / "tensors.json").write_text(json.dumps(index))
    message = refused(reseal(path))
    assert INDEXES[name][1] in message
    assert f"{path}/" in message
    assert examine(path).problem in message


TEXTS = {
    "nothing": b"",
    "no text": b"\xff" * 100,
    "a list": b"[]",
    "nested lists": b"[" * 500_000,
    "a tensor twice": b'{"a": {"dtype": "int8", "shape": [0], "shards": {}}, "a": {}}',
    "a pickle": pickle.dumps({"model.a": 1}),
}


@pytest.mark.parametrize("name", TEXTS)
def test_an_index_that_is_none(path: Path, name: str) -> None:
    (path / "tensors.json").write_bytes(TEXTS[name])
    assert f"{path}/tensors.json: not an index of tensors: " in refused(reseal(path))
    assert "tensors.json: not an index of tensors: " in examine(path).problem


def test_many_shards_along_any_dimension_are_compared_quickly() -> None:
    for dim in (0, 1):
        boxes = [tuple((n, n + 1) if at == dim else (0, 2) for at in (0, 1)) for n in range(20_000)]
        began = time.monotonic()
        assert tiling_problem([20_000 if at == dim else 2 for at in (0, 1)], boxes) == ""
        assert time.monotonic() - began < SECONDS


def test_a_staircase_of_shards_is_compared_quickly() -> None:
    """Along each dimension, every shard reaches as far as half of the others."""
    steps = 20_000
    boxes = [((low, high), (n, n + 1)) for n in range(steps) for low, high in ((0, n), (n, steps)) if low < high]
    began = time.monotonic()
    assert tiling_problem([steps, steps], boxes) == ""
    moved = [*boxes[:-1], ((0, 1), (0, 1))]
    assert tiling_problem([steps, steps], moved) == "shards that overlap"
    assert time.monotonic() - began < SECONDS


def test_shards_cut_along_more_dimensions_than_anybody_cuts() -> None:
    halves = [*itertools.product(((0, 1), (1, 2)), repeat=7)]
    assert tiling_problem([2] * 7, halves) == "shards along 7 dimensions, more than the 6 that can be compared"
    assert tiling_problem([2] * 6, [*itertools.product(((0, 1), (1, 2)), repeat=6)]) == ""


@pytest.mark.parametrize("seed", range(4))
def test_shards_cover_a_tensor_exactly_once(seed: int) -> None:
    """Compared with a count of every element."""
    draw, seen = random.Random(seed), set()
    for _ in range(500):
        shape = [draw.randint(1, 3) for _ in range(draw.randint(1, 3))]
        boxes = [tuple((0, size) for size in shape)]
        for _ in range(draw.randint(0, 4)):
            box, dim = boxes.pop(draw.randrange(len(boxes))), draw.randrange(len(shape))
            low, high = box[dim]
            cut = draw.randint(low + 1, high)
            parts = [(low, cut), (cut, high)] if cut < high else [(low, high)]
            boxes += [(*box[:dim], part, *box[dim + 1 :]) for part in parts]
        if draw.random() < 0.5:
            lows = [draw.randrange(size) for size in shape]
            boxes[0] = tuple((low, draw.randint(low + 1, size)) for low, size in zip(lows, shape, strict=True))
        counts = torch.zeros(shape)
        for box in boxes:
            counts[tuple(slice(*one) for one in box)] += 1
        seen.add(right := bool((counts == 1).all()))
        assert (tiling_problem(shape, boxes) == "") is right, (shape, boxes)
    assert seen == {True, False}


def test_a_damaged_index_is_refused_or_means_the_same_files(path: Path) -> None:
    """Whatever its bytes are: an index of this folder, or one message."""
    data, source = (path / "tensors.json").read_bytes(), random.Random(0)
    for _ in range(400):
        spoilt = bytearray(data)
        for _ in range(source.randint(1, 4)):
            spoilt[source.randrange(len(spoilt))] = source.randrange(256)
        (path / "tensors.json").write_bytes(spoilt[: source.choice([len(spoilt), source.randrange(len(spoilt))])])
        index._read.cache_clear()
        try:
            read = index.read_index(path)
        except ConfigError:
            continue
        assert {shard.file for entry in read.values() for shard in entry.shards} <= {"rank-00000-0.safetensors"}


# -- the tensors ----------------------------------------------------------------------------------


def rewritten(change: Callable[[Any], object]) -> Callable[[bytes], bytes]:
    """Another header for the same values, as long as the old one."""

    def apply(data: bytes) -> bytes:
        size = int.from_bytes(data[:8], "little")
        table = json.loads(data[8 : 8 + size])
        change(table)
        return data[:8] + json.dumps(table).encode().ljust(size) + data[8 + size :]

    return apply


def described(**changes: object) -> Callable[[bytes], bytes]:
    return rewritten(lambda table: table["model.a[0:8,0:8]"].update(changes))


def exchanged(table: Any) -> None:
    a, c = "model.a[0:8,0:8]", "model.c[0:8,0:8]"
    table[a], table[c] = table[c], table[a]


def with_header(length: int, text: bytes) -> Callable[[bytes], bytes]:
    return lambda data: struct.pack("<Q", length) + text + data[8 + len(text) :]


WHOLE = "not a whole safetensors file: "
HEADERS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "another shape": (described(shape=[4, 16]), "it is 4 × 16 of F32 at byte 4,096, and 8 × 8 of F32 at byte 4,096 by"),
    "another dtype": (described(dtype="I32"), "it is 8 × 8 of I32 at byte 4,096, and 8 × 8 of F32 at byte 4,096 by"),
    "another tensor's values": (rewritten(exchanged), "can't be read: it is 8 × 8 of F32 at byte 4,"),
    "a dtype that there is none of": (described(dtype="F31"), WHOLE),
    "a huge shape": (described(shape=[1 << 40, 1 << 20]), WHOLE),
    "values beyond the end": (described(data_offsets=[0, 10**15]), WHOLE),
    "values that overlap": (described(data_offsets=[128, 384]), WHOLE),
    "a negative place": (described(data_offsets=[-256, 0]), WHOLE),
    "text for a shape": (described(shape="8"), WHOLE),
    "a tensor that is gone": (rewritten(lambda table: table.pop("model.a[0:8,0:8]")), WHOLE),
    "a tensor of another name": (
        rewritten(lambda table: table.update({"model.x": table.pop("model.a[0:8,0:8]")})),
        "'model.a[0:8,0:8]' can't be read: it is not in this file",
    ),
    "a header without end": (with_header(2**63, b"{}"), WHOLE),
    "a header longer than the file": (with_header(1 << 20, b"{}"), WHOLE),
    "no table": (with_header(4, b"[[]]"), WHOLE),
    "no text": (with_header(100, b"\xff" * 100), WHOLE),
    "nested lists": (with_header(4000, b"[" * 4000), WHOLE),
    "a pickle": (lambda data: pickle.dumps([1, 2]).ljust(len(data)), WHOLE),
    "nothing": (lambda data: b"", "end at byte 4,352 of 'rank-00000-0.safetensors', which has 0"),
    "a part": (lambda data: data[:4100], "of 'rank-00000-0.safetensors', which has 4,100"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_file_that_lies(path: Path, name: str) -> None:
    weights(path).write_bytes(HEADERS[name][0](weights(path).read_bytes()))
    message = refused(reseal(path))
    assert HEADERS[name][1] in message
    assert examine(path).problem in message


def test_a_damaged_file_is_refused_or_gives_tensors_of_their_shape(path: Path) -> None:
    data, source = weights(path).read_bytes(), random.Random(0)
    used = len(data[:4096].rstrip())
    for _ in range(300):
        spoilt = bytearray(data)
        for _ in range(source.randint(1, 8)):
            spoilt[source.randrange(used)] = source.randrange(256)
        weights(path).write_bytes(spoilt)
        index._read.cache_clear()
        try:
            read = read_range(path, "model.a", ((0, 8), (0, 8)))
            check_shards(path)
        except ConfigError:
            continue
        assert read.shape == (8, 8)


def values_of(tensor: torch.Tensor) -> bytes:
    return tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_every_kind_of_tensor_comes_back(tmp_path: Path) -> None:
    tensors = {
        "transposed": torch.arange(12).view(3, 4).t(),
        "single": torch.tensor(5.0, dtype=torch.float64),
        "empty": torch.ones(0, 4),
        "narrow": torch.randn(4).to(torch.float8_e4m3fn),
        "conjugate": torch.randn(2, 2, dtype=torch.complex64).conj(),
        "truth": torch.tensor([True, False]),
        "half": torch.randn(3).half(),
        "unsigned": torch.tensor([1, 2**63], dtype=torch.uint64),
        "expanded": torch.ones(1).expand(5),
        "wide": torch.randn(2, 2, dtype=torch.complex128),
        "packed": torch.arange(6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "codes": torch.arange(256, dtype=torch.uint8),
        "scale": torch.tensor([127, 130], dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "counts": torch.tensor([-1, 2**62]),
        "part": torch.arange(10)[3:7],
    }
    path = save_step(tmp_path, 1, {"model": tensors, "progress": {"step": 1}}, ALONE, beside=[]).path
    read = checkpoint.load(path, {}, ALONE)["model"]
    for name, tensor in tensors.items():
        assert (read[name].shape, read[name].dtype) == (tensor.shape, tensor.dtype), name
        assert values_of(read[name]) == values_of(tensor), name


# -- the manifest and the state -------------------------------------------------------------------


def sealed(change: Callable[[Any], object]) -> Callable[[Path], object]:
    def apply(path: Path) -> None:
        manifest = json.loads((path / "manifest.json").read_text())
        change(manifest)
        (path / "manifest.json").write_text(json.dumps(manifest))

    return apply


def file(name: str) -> Callable[[Path], object]:
    return sealed(lambda manifest: manifest["files"].update({name: {"bytes": 1, manifest["hash"]: "0"}}))


def link(name: str, target: str) -> Callable[[Path], object]:
    def apply(path: Path) -> None:
        (path / name).unlink()
        (path / name).symlink_to(target)

    return apply


def pipe(path: Path) -> None:
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")


def sparse(name: str) -> Callable[[Path], object]:
    """A file of a terabyte that takes no room."""
    return lambda path: os.truncate(path / name, 1 << 40)


def moved_out(path: Path) -> None:
    (path / "state.json").rename(path.parent / "state.json")
    (path / "state.json").symlink_to("../state.json")


def linked_folder(path: Path) -> None:
    (path.parent / "tokenizer").mkdir()
    (path.parent / "tokenizer" / "x").write_text("y")
    (path / "tokenizer").symlink_to("../tokenizer")
    file("tokenizer/x")(path)


MANIFESTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file above": (file("../../x"), "manifest.json names '../../x', which is not in this folder"),
    "an absolute file": (file("/etc/passwd"), "manifest.json names '/etc/passwd', which is not in this folder"),
    "a hidden way up": (file("a/../../x"), "manifest.json names 'a/../../x', which is not in this folder"),
    "a null byte": (file("a\0b"), r"manifest.json names 'a\x00b', as no file of a checkpoint is called"),
    "colours for the terminal": (file("\x1b[2J"), r"manifest.json names '\x1b[2J', as no file of a"),
    "a long name": (file("a" * 100_000), "as no file of a checkpoint is called"),
    "an editable file above": (sealed(lambda m: m.update(editable=["../x"])), "names '../x', which is not in this"),
    "a number for a name": (sealed(lambda m: m.update(editable=[3])), "it is no list of files"),
    "a list for a size": (
        sealed(lambda m: m["files"]["state.json"].update(bytes=[1])),
        "it is no list of files",
    ),
    "a long step": (sealed(lambda m: m.update(step=10**4000)), "it is of step 10000000000000000000, whatever its name"),
    "nested lists": (lambda p: (p / "manifest.json").write_text("[" * 500_000), "it is nested too deeply"),
    "nested objects": (
        lambda p: (p / "manifest.json").write_text('{"a":' * 500 + "1" + "}" * 500),
        "it is nested too deeply",
    ),
    "no text": (lambda p: (p / "manifest.json").write_bytes(b"\xff" * 100), "manifest.json can't be read"),
    "a terabyte": (sparse("manifest.json"), "it has 1,099,511,627,776 bytes, and at most 67,108,864 are read"),
    "a link to a device": (link("manifest.json", "/dev/zero"), "it is a link, and links are not followed"),
    "a pipe": (pipe, "it is no regular file"),
    "a link to itself": (link("state.json", "state.json"), "state.json can't be read: it is a link"),
    "a link out of the folder": (moved_out, "state.json can't be read: it is a link, and links are not followed"),
    "a folder that is a link": (linked_folder, "tokenizer/x is in a folder that is a link"),
    "an unknown hash": (
        sealed(lambda m: m.update(hash="crc32")),
        "manifest.json names the hash 'crc32'; this forge knows sha256, xxh3_128",
    ),
    "a hash that is a list": (sealed(lambda m: m.update(hash=[])), "names the hash '[]'; this forge knows"),
    "a newer format": (
        sealed(lambda m: m.update(format=4)),
        "written by a newer forge: format 4, this reads 3. Update forge-train to read it.",
    ),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_hostile_manifest(path: Path, name: str) -> None:
    MANIFESTS[name][0](path)
    assert MANIFESTS[name][1] in refused(path)


@pytest.mark.parametrize("name", ["state.json", "tensors.json"])
def test_a_terabyte_of_nothing_is_not_read(path: Path, name: str) -> None:
    sparse(name)(path)
    sealed(lambda manifest: manifest["files"][name].update(bytes=1 << 40))(path)
    assert f"{name} has 1,099,511,627,776 bytes, and at most " in refused(path)


def state(**values: object) -> Callable[[Path], object]:
    def apply(path: Path) -> None:
        held = json.loads((path / "state.json").read_text())
        (path / "state.json").write_text(json.dumps({**held, **values}))

    return apply


STATES: dict[str, tuple[Callable[[Path], object], str]] = {
    "nested": (lambda p: (p / "state.json").write_text('{"a":' * 500_000), "it is nested too deeply"),
    "nested a little": (state(a=json.loads("[" * 300 + "]" * 300)), "it is nested too deeply"),
    "no table": (lambda p: (p / "state.json").write_text("[]"), "state.json is no table"),
    "a tensor that is not there": (state(plugins={"$tensor": "x"}), "names the tensor 'x', which is not in it"),
    "a list for a tensor": (state(plugins={"a": {"$tensor": ["x"]}}), "names the tensor \"['x']\", which is not in it"),
    "numbers that are nowhere": (state(not_finite={"a[3]": "nan"}), "what 'not_finite' names is not there"),
    "a number of another kind": (state(a=1, not_finite={"a": "x"}), "what 'not_finite' names is not there"),
    "a path without end": (state(not_finite={"[1" * 200_000 + "]": "nan"}), "what 'not_finite' names is not there"),
    "text for progress": (state(progress={"step": "1"}), "'step' of 'progress' is '1', which is no count"),
    "a list for progress": (state(progress=[]), "'progress' is a list"),
    "text for plugins": (state(enabled=["adamw"]), "entry 0 of 'enabled' is a text"),
    "no path": (state(base={"path": 3, "digest": ""}), "'path' of 'base' is a number"),
    "names that are none": (state(odd={"plain": [["a"]]}), "entry 0 of 'plain' of 'odd' is a list"),
    "factors without end": (
        state(evaluation={f"{{name}}.{n}": 1.0 for n in range(1000)}),
        "'evaluation' holds more than 100 factors",
    ),
    "a newer format": (state(format=4), "written by a newer forge: format 4, this reads 3"),
    "no format": (state(format=None), "checkpoint format 'None'; this forge reads 3"),
}


@pytest.mark.parametrize("name", STATES)
def test_a_hostile_state(path: Path, name: str) -> None:
    STATES[name][0](path)
    message = refused(reseal(path))
    assert STATES[name][1] in message


def test_what_is_refused_writes_nothing(path: Path, tmp_path: Path) -> None:
    """The checks read; a run's folder looks as before."""
    file("../../x")(path)
    before = sorted(str(one) for one in tmp_path.rglob("*"))
    refused(path)
    assert check(path)
    assert sorted(str(one) for one in tmp_path.rglob("*")) == before


# -- folders of others ----------------------------------------------------------------------------

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 4, "num_hidden_layers": 1}


def safetensors(length: int, header: bytes) -> Callable[[Path], object]:
    return lambda path: (path / "model.safetensors").write_bytes(struct.pack("<Q", length) + header)


def declared(shape: list[int], end: int) -> Callable[[Path], object]:
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}}).encode()
    return safetensors(len(header), header + bytes(16))


def config(text: str) -> Callable[[Path], object]:
    return lambda path: (path / "config.json").write_text(text)


def index_of(names: dict[str, str]) -> Callable[[Path], object]:
    return lambda path: (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def device(path: Path) -> None:
    (path / "model.safetensors").symlink_to("/dev/zero")


def huge_header(path: Path) -> None:
    safetensors(1 << 40, b"{}")(path)
    sparse("model.safetensors")(path)


FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a header without end": (safetensors(2**63, b"{}"), "not a whole safetensors file"),
    "a header of a terabyte": (huge_header, "not a whole safetensors file"),
    "a header that is nested": (safetensors(500_000, b"[" * 500_000), "not a whole safetensors file"),
    "a huge tensor": (declared([1 << 40, 1 << 20], 16), "not a whole safetensors file"),
    "a tensor beyond the file": (declared([1 << 38], 1 << 40), "not a whole safetensors file"),
    "a device": (device, "found neither model.safetensors nor"),
    "nested text": (config("[" * 500_000), "config.json: can't be read: ValueError: it is nested too deeply"),
    "a terabyte of text": (lambda path: (config("{}")(path), sparse("config.json")(path)), "1,099,511,627,776 bytes"),
    "a file elsewhere": (index_of({"a": "../model.safetensors"}), "../model.safetensors: no such file"),
    "a billion layers": (config(json.dumps({**CONFIG, "num_hidden_layers": 10**9})), "is 1,000,000,000, but the files"),
    "a wide layer": (config(json.dumps({**CONFIG, "hidden_size": 10**18})), "but the files hold only 4 values"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_hostile_hugging_face_folder(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    if name in ("a billion layers", "a wide layer"):
        declared([4], 16)(path)
    FOLDERS[name][0](path)

    def use(path: Path) -> None:
        try:
            Folder.open(path).check_sizes()
        except ConfigError as error:
            raise ConfigError(str(error).replace("\n", " ").rstrip(".") + ".") from error

    assert FOLDERS[name][1] in refused(path, use)


@pytest.mark.parametrize("text", ["[" * 500_000, '{"format": "forge-tokens", "version": 1, "seal": "0", "shards": 3}'])
def test_a_hostile_prepared_folder(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    refused(tmp_path, lambda path: read_manifest(path, key="tokens.path"))
    sparse("manifest.json")(tmp_path)
    assert "at most 67,108,864 are read" in refused(tmp_path, lambda path: read_manifest(path, key="tokens.path"))


def test_what_could_not_be_read_again_is_not_saved(tmp_path: Path) -> None:
    class Own(torch.Tensor):
        """A tensor of a class of its own."""

    own = {"optimizer": {"state": {"a": torch.ones(2).as_subclass(Own)}}}
    with pytest.raises(PluginError, match=r"'optimizer\.state\.a' holds a Own, a tensor of a class of its own"):
        save_step(tmp_path, 1, {**STATE, **own}, ALONE, beside=[])
    deep: Any = 1
    for _ in range(40):
        deep = {"a": (deep,)}
    with pytest.raises(PluginError, match="is nested deeper than 100 levels, which can't be read again"):
        save_step(tmp_path, 1, {**STATE, "plugins": deep}, ALONE, beside=[])
    for _ in range(8):
        deep = deep["a"][0]
    path = save_step(tmp_path, 1, {**STATE, "plugins": deep}, ALONE, beside=[]).path
    assert checkpoint.load(path, {}, ALONE)["plugins"] == deep
