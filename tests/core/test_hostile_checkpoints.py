"""Checkpoints and folders that mean harm: each is refused by name, quickly, in little memory, and runs nothing."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import resource
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_train import ConfigError, PluginError
from forge_train.storage import checkpoint, dcp, metadata
from forge_train.storage.hf_folder import Folder
from forge_train.storage.seal import ALONE, check
from forge_train.storage.shards import check_shards
from forge_train_kit.data.manifest import read_manifest
from forge_train_tools.offline.examine import examine
from tiny_models import reseal

pytestmark = [pytest.mark.unit, pytest.mark.accept("checkpoints", 7)]

STATE = {
    "model": {"a": torch.arange(64.0).reshape(8, 8), "b": torch.ones(3, dtype=torch.bfloat16)},
    "progress": {"step": 1, "tokens": 2},
}
SECONDS, MEMORY = 10, 256 << 20
"""Far above what a refusal takes, far below what each attack asks for."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return checkpoint.save(tmp_path / "checkpoints", 1, STATE, ALONE, beside=[]).path


def weights(path: Path) -> Path:
    return next(path.glob("*.distcp"))


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


class Touches:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch run-by-pickle",)


def op(name: str, *arguments: bytes) -> bytes:
    import pickletools

    code = next(one.code for one in pickletools.opcodes if one.name == name)
    return code.encode("latin-1") + b"".join(arguments)


def nested(levels: int) -> bytes:
    """A tuple of itself, of itself, …: small, and 2^levels values once it is walked through, hashed or printed."""
    made = op("EMPTY_TUPLE") + op("MEMOIZE")
    for level in range(levels):
        made += op("BINGET", bytes([level])) * 2 + op("TUPLE2") + op("MEMOIZE")
    return op("MARK") + made + op("TUPLE")


PROTOCOL = op("PROTO", b"\x04")
PICKLES: dict[str, bytes] = {
    **{f"a command, protocol {n}": pickle.dumps(Touches(), protocol=n) for n in range(6)},
    "a command, by an instance": b"(S'touch run-by-pickle'\nios\nsystem\n.",
    "a command, by an object": b"(cos\nsystem\nS'touch run-by-pickle'\no.",
    "a command, by an attribute": PROTOCOL + b"cbuiltins\ngetattr\n(cos\nsystem\nX\x01\x00\x00\x00xtR.",
    "a module that is imported": PROTOCOL + b"cantigravity\ngeohash\n.",
    "a dotted name": PROTOCOL + op("SHORT_BINUNICODE", b"\x05torch", b"\x8c\x0eos.path.system\x93."),
    "an extension": PROTOCOL + op("EXT1", b"\x01") + b".",
    "a huge place in the memo": PROTOCOL + op("NONE") + op("LONG_BINPUT", b"\xff\xff\xff\x7f") + b".",
    "a huge string": PROTOCOL + op("BINUNICODE", b"\xff\xff\xff\x7f") + b".",
    "a huger string": PROTOCOL + op("BINUNICODE8", b"\xff" * 8) + b".",
    "huge bytes": PROTOCOL + op("BYTEARRAY8", b"\xff\xff\xff\xff\xff\x00\x00\x00") + b".",
    "a huge number": PROTOCOL + op("LONG4", b"\xff\xff\xff\x7f") + b".",
    "a huge frame": PROTOCOL + op("FRAME", b"\xff" * 8) + b".",
    "a billion laughs": PROTOCOL + nested(60) + b".",
    "a billion laughs as a key": PROTOCOL + op("EMPTY_DICT") + nested(60) + op("NONE") + op("SETITEM") + b".",
    "a billion laughs as a dtype": pickle.dumps(None)[:2]
    + b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}(X\x13\x00\x00\x00state_dict_metadata}"
    + b"X\x01\x00\x00\x00a"
    + b"ctorch.distributed.checkpoint.metadata\nTensorStorageMetadata\n)\x81}X\x0a\x00\x00\x00properties"
    + b"ctorch.distributed.checkpoint.metadata\nTensorProperties\n)\x81"
    + nested(60)
    + op("TUPLE1")
    + b"bsbsub.",
    "a million marks": PROTOCOL + op("MARK") * 1_000_000 + b".",
    "a list in itself": PROTOCOL + op("EMPTY_LIST") + op("MEMOIZE") + op("BINGET", b"\0") + op("APPEND") + b".",
    "an end without a value": PROTOCOL + b".",
    "zeros": bytes(1000),
}


@pytest.mark.parametrize("name", PICKLES)
def test_a_hostile_pickle_as_index(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (path / ".metadata").write_bytes(PICKLES[name])
    message = refused(reseal(path))
    assert f"{path}/.metadata: " in message
    assert "nothing in it was run" in message or "not an index of tensors" in message
    assert not Path("run-by-pickle").exists()
    assert examine(path).problem


def test_the_pickles_that_run_a_command_do_so_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    harmful = [data for name, data in PICKLES.items() if name.startswith("a command") and "attribute" not in name]
    for data in harmful:
        pickle.loads(data)
        Path("run-by-pickle").unlink()
    assert len(harmful) == 8


def changed(path: Path, change: Callable[[Any], object]) -> Path:
    index = metadata.read_index(path)
    change(index)
    (path / ".metadata").write_bytes(pickle.dumps(index))
    return reseal(path)


def of_a(index: Any) -> Any:
    return index.state_dict_metadata["model.a"]


def place_of_a(index: Any) -> Any:
    return next(where for at, where in index.storage_data.items() if at.fqn == "model.a")


def copies(index: Any) -> None:
    """A thousand tensors in the bytes of one."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    tensor, place = of_a(index), place_of_a(index)
    for number in range(1000):
        index.state_dict_metadata[f"model.{number}"] = tensor
        index.storage_data[MetadataIndex(f"model.{number}", tensor.chunks[0].offsets)] = place


def huge(index: Any) -> None:
    of_a(index).size = of_a(index).chunks[0].sizes = torch.Size([1 << 40, 1 << 20])


def grown(index: Any) -> None:
    of_a(index).size = torch.Size([1 << 40, 8])


INDEXES: dict[str, tuple[Callable[[Any], object], str]] = {
    "a huge tensor": (huge, "declares 4,611,686,018,427,387,904 bytes for a shard of 'model.a' that has "),
    "a tensor larger than its shards": (grown, "shards of 'model.a' that do not add up to the tensor"),
    "a shard outside": (
        lambda index: setattr(of_a(index).chunks[0], "offsets", torch.Size([8, 0])),
        "a shard of 'model.a' that does not lie in the tensor",
    ),
    "the same shard twice": (
        lambda index: of_a(index).chunks.append(of_a(index).chunks[0]),
        "shards of 'model.a' that do not add up",
    ),
    "a thousand tensors in one place": (copies, "bytes of tensors in __0_0.distcp, which has "),
    "a place beyond the file": (
        lambda index: setattr(place_of_a(index), "length", 1 << 50),
        "bytes of tensors in __0_0.distcp, which has ",
    ),
    "a number that is too large": (
        lambda index: setattr(place_of_a(index), "offset", 1 << 70),
        "not an index of tensors: TypeError: 1180591620717411303424 is no size",
    ),
    "a hundred dimensions": (
        lambda index: setattr(of_a(index), "size", torch.Size([1] * 100)),
        "a tuple is no shape",
    ),
    "no place": (lambda index: index.storage_data.clear(), "says nothing of where a shard of 'model.a' lies"),
    "a file elsewhere": (
        lambda index: setattr(place_of_a(index), "relative_path", "/etc/passwd"),
        "names the file '/etc/passwd', which is not in the checkpoint's folder",
    ),
    "a file that is not there": (
        lambda index: setattr(place_of_a(index), "relative_path", "__9_9.distcp"),
        "names __9_9.distcp, which can't be read",
    ),
    "another file": (
        lambda index: setattr(place_of_a(index), "relative_path", "state.json"),
        "in state.json, which has",
    ),
    "another place": (lambda index: setattr(place_of_a(index), "offset", 7), "'model.a' can't be read: "),
    "the place of another": (
        lambda index: vars(place_of_a(index)).update(
            vars(next(where for at, where in index.storage_data.items() if at.fqn == "model.b"))
        ),
        "'model.a' can't be read: it is 3 of bfloat16, and 8 × 8 of float32 by the index",
    ),
    "another dtype": (
        lambda index: setattr(of_a(index).properties, "dtype", torch.int8),
        "'model.a' can't be read: it is 8 × 8 of float32, and 8 × 8 of int8 by the index",
    ),
}


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_that_lies(path: Path, name: str) -> None:
    changed(path, INDEXES[name][0])
    message = refused(path)
    assert INDEXES[name][1] in message
    assert examine(path).problem in message


def test_a_damaged_index_is_refused_or_means_the_same_files(path: Path) -> None:
    """Whatever its bytes are: an index of this folder, or one message."""
    data, source = (path / ".metadata").read_bytes(), random.Random(0)
    for _ in range(400):
        spoilt = bytearray(data)
        for _ in range(source.randint(1, 4)):
            spoilt[source.randrange(len(spoilt))] = source.randrange(256)
        (path / ".metadata").write_bytes(spoilt[: source.choice([len(spoilt), source.randrange(len(spoilt))])])
        metadata._read.cache_clear()
        try:
            index = metadata.read_index(path)
        except ConfigError:
            continue
        assert {place.relative_path for place in (index.storage_data or {}).values()} <= {"__0_0.distcp"}


# -- the tensors ----------------------------------------------------------------------------------


def torch_file(change: Callable[[dict[str, bytes]], object], method: int = zipfile.ZIP_STORED) -> bytes:
    """A tensor as torch saves it, with some of its files changed."""
    saved, made = io.BytesIO(), io.BytesIO()
    torch.save(STATE["model"]["a"], saved)
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(made, "w", method) as new:
        files = {name: old.read(name) for name in old.namelist()}
        change(files)
        for name, content in files.items():
            new.writestr(name, content)
    return made.getvalue()


def pickled(value: bytes) -> Callable[[dict[str, bytes]], object]:
    return lambda files: files.update({"archive/data.pkl": value})


def rebuilt(offset: int = 0, size: tuple[int, ...] = (8, 8), stride: tuple[int, ...] = (8, 1)) -> bytes:
    """How torch describes a tensor."""

    class Tensor:
        def __reduce__(self) -> Any:
            return torch._utils._rebuild_tensor_v2, (Storage(), offset, size, stride, False, {})

    class Storage: ...

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: object) -> Any:
            return ("storage", torch.FloatStorage, "0", "cpu", 64) if isinstance(value, Storage) else None

    made = io.BytesIO()
    Pickler(made, 2).dump(Tensor())
    return made.getvalue()


def bomb(files: dict[str, bytes]) -> None:
    files["archive/data/0"] = bytes(64 << 20)


TENSORS: dict[str, tuple[Callable[[], bytes], str]] = {
    "a command": (
        lambda: torch_file(pickled(pickle.dumps(Touches(), 2))),
        "it names posix.system, which a tensor",
    ),
    "bytes without end": (
        lambda: torch_file(pickled(b"\x80\x02cbuiltins\nbytearray\n(\x8a\x05\x00\x00\x00\x00\x10tR.")),
        "it names builtins.bytearray",
    ),
    "a zip bomb": (lambda: torch_file(bomb, zipfile.ZIP_DEFLATED), "compressed or encrypted"),
    "values before the storage": (
        lambda: torch_file(pickled(rebuilt(offset=-1))),
        "it is no tensor as torch saves",
    ),
    "values beyond the storage": (lambda: torch_file(pickled(rebuilt(offset=1))), "it declares 64 values in 256 bytes"),
    "a step beyond the storage": (
        lambda: torch_file(pickled(rebuilt(stride=(1 << 40, 1)))),
        "it declares 64 values in 256 bytes",
    ),
    "a number repeated": (
        lambda: torch_file(pickled(rebuilt(size=(1 << 40, 8), stride=(0, 0)))),
        "it declares 8,796,093,022,208 values in 256 bytes",
    ),
    "too many dimensions": (
        lambda: torch_file(pickled(rebuilt(size=(8, 8), stride=(8,)))),
        "it is no tensor as torch saves",
    ),
    "no storage": (lambda: torch_file(lambda files: files.pop("archive/data/0")), "it is no tensor as torch saves"),
    "another byte order": (
        lambda: torch_file(lambda files: files.update({"archive/byteorder": b"big"})),
        "not in the byte order of this machine",
    ),
    "a long description": (
        lambda: torch_file(pickled(b"\x80\x02" + b"N" * (1 << 20))),
        "its description has 1,048,578 bytes",
    ),
    "many files": (
        lambda: torch_file(lambda files: files.update({f"archive/{n}": b"" for n in range(5000)})),
        "its archive's directory is too large",
    ),
    "no archive": (lambda: pickle.dumps(Touches(), 2).ljust(300), "it is no archive as torch writes it"),
    "nothing": (lambda: b"", "declares 256 bytes for a shard of 'model.a' that has 0"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_hostile_tensor(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    data, expected = TENSORS[name][0](), TENSORS[name][1]
    (path / "__0_1.distcp").write_bytes(data)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["__0_1.distcp"] = {}
    (path / "manifest.json").write_text(json.dumps(manifest))
    changed(
        path, lambda index: vars(place_of_a(index)).update(relative_path="__0_1.distcp", offset=0, length=len(data))
    )
    message = refused(path)
    assert expected in message
    assert examine(path).problem in message
    assert not Path("run-by-pickle").exists()


def test_the_description_that_tests_change_is_one_that_is_read(path: Path) -> None:
    (path / "__0_1.distcp").write_bytes(data := torch_file(pickled(rebuilt())))
    changed(
        path, lambda index: vars(place_of_a(index)).update(relative_path="__0_1.distcp", offset=0, length=len(data))
    )
    assert torch.equal(dcp.read_one(path, "model.a", (8, 8), torch.float32), STATE["model"]["a"])


def test_a_damaged_tensor_is_refused_or_is_one_of_its_shape(path: Path) -> None:
    data, source = weights(path).read_bytes(), random.Random(0)
    for _ in range(300):
        spoilt = bytearray(data)
        for _ in range(source.randint(1, 8)):
            spoilt[source.randrange(len(spoilt))] = source.randrange(256)
        weights(path).write_bytes(spoilt)
        try:
            read = dcp.read_one(path, "model.a", (8, 8), torch.float32)
            check_shards(path)
        except ConfigError:
            continue
        assert read.shape == (8, 8)


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
        "part": torch.arange(10)[3:7],
    }
    path = checkpoint.save(tmp_path, 1, {"model": tensors, "progress": {"step": 1}}, ALONE, beside=[]).path
    read = checkpoint.load(path, {}, ALONE)["model"]
    for name, tensor in tensors.items():
        assert (read[name].shape, read[name].dtype) == (tensor.shape, tensor.dtype), name
        assert read[name].tolist() == tensor.tolist() if name != "narrow" else read[name].float().equal(tensor.float())


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
        sealed(lambda m: m.update(format=3)),
        "written by a newer forge: format 3, this reads 1 and 2. Update forge-train to read it.",
    ),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_hostile_manifest(path: Path, name: str) -> None:
    MANIFESTS[name][0](path)
    assert MANIFESTS[name][1] in refused(path)


@pytest.mark.parametrize("name", ["state.json", ".metadata"])
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
    "text for progress": (state(progress={"step": "1"}), "'progress' holds something else than counts"),
    "a list for progress": (state(progress=[]), "'progress' is a list"),
    "text for plugins": (state(enabled=["adamw"]), "'enabled' holds something else than plugins"),
    "no path": (state(base={"path": 3, "digest": ""}), "'base' is no checkpoint"),
    "names that are none": (state(odd={"plain": [["a"]]}), "'odd' holds something else than names"),
    "factors without end": (
        state(evaluation={f"{{name}}.{n}": 1.0 for n in range(1000)}),
        "'evaluation' holds something else than at most 100 factors",
    ),
    "a newer format": (state(format=3), "written by a newer forge: format 3, this reads 1 and 2"),
    "no format": (state(format=None), "checkpoint format 'None'; this forge reads 1 and 2"),
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


def index(names: dict[str, str]) -> Callable[[Path], object]:
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
    "a file elsewhere": (index({"a": "../model.safetensors"}), "../model.safetensors: no such file"),
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
        checkpoint.save(tmp_path, 1, {**STATE, **own}, ALONE, beside=[])
    deep: Any = 1
    for _ in range(40):
        deep = {"a": (deep,)}
    with pytest.raises(PluginError, match="is nested deeper than 100 levels, which can't be read again"):
        checkpoint.save(tmp_path, 1, {**STATE, "plugins": deep}, ALONE, beside=[])
    for _ in range(8):
        deep = deep["a"][0]
    path = checkpoint.save(tmp_path, 1, {**STATE, "plugins": deep}, ALONE, beside=[]).path
    assert checkpoint.load(path, {}, ALONE)["plugins"] == deep
