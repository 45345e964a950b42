"""DCP folders that mean harm: each is refused by the name of the file, in little memory, and runs nothing."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from forge_train import ConfigError
from forge_train.checkpoint import checkpoint
from forge_train.checkpoint.seal import ALONE
from forge_train_tools.offline.dcp import export_dcp, import_dcp
from saving import save_step
from tiny_models import reseal

pytestmark = [
    pytest.mark.unit,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

FORMATS = Path(__file__).parents[1] / "formats"
SECRET = "nobody else may read this"


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """Of another program."""
    dcp.save(
        {"a": torch.arange(64.0).reshape(8, 8), "b": torch.ones(8, 8), "step": {"step": 3}},
        checkpoint_id=tmp_path / "theirs",
        no_dist=True,
    )
    return tmp_path / "theirs"


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """Of Forge, with everything beside the tensors, and no manifest."""
    state = {
        "model": {"a": torch.arange(64.0).reshape(8, 8), "b": torch.ones(8, 8)},
        "optimizer": {"betas": (0.9, 0.99)},
        "progress": {"step": 1, "tokens": 2},
    }
    (tmp_path / "beside" / "tokenizer" / "additional_chat_templates").mkdir(parents=True)
    (tmp_path / "beside" / "tokenizer" / "tokenizer.json").write_text("{}")
    (tmp_path / "beside" / "tokenizer" / "additional_chat_templates" / "a.jinja").write_text("a")
    for name in ("config.toml", "plugins.json"):
        (tmp_path / "beside" / name).write_text("")
    beside = sorted((tmp_path / "beside").iterdir())
    path = save_step(tmp_path / "checkpoints", 1, state, ALONE, beside=beside).path
    export_dcp(path, tmp_path / "ours")
    return tmp_path / "ours"


def refused(path: Path) -> str:
    target = path.with_name("imported")
    with pytest.raises(ConfigError) as caught:
        import_dcp(path, target)
    text = str(caught.value)
    assert str(path) in text
    assert "\n" not in text
    assert len(text) < 700
    assert text.endswith(".")
    assert sorted(one.name for one in path.parent.iterdir() if "imported" in one.name) == []
    return text


# -- links and special files ----------------------------------------------------------------------


def test_everything_beside_the_tensors_comes_along(ours: Path, tmp_path: Path) -> None:
    import_dcp(ours, tmp_path / "imported")
    names = ["config.toml", "plugins.json", "tokenizer/tokenizer.json", "tokenizer/additional_chat_templates/a.jinja"]
    assert all((tmp_path / "imported" / name).read_text() == (ours / name).read_text() for name in names)


NAMES = (
    *(".metadata", "__0_0.distcp", "state.json", "config.toml", "plugins.json", "tokenizer/tokenizer.json"),
    *("tokenizer/additional_chat_templates/a.jinja", "tokenizer/.hidden", "tokenizer"),
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["a link", "a link to nothing", "a pipe"])
def test_links_and_pipes_are_refused(ours: Path, tmp_path: Path, name: str, kind: str) -> None:
    moved = tmp_path / "elsewhere"
    if (ours / name).exists():
        (ours / name).rename(moved)
    else:
        moved.write_text(SECRET)
    if kind == "a pipe":
        os.mkfifo(ours / name)
    else:
        (ours / name).symlink_to(moved if kind == "a link" else tmp_path / "nothing")
    said = refused(ours)
    assert name in said
    assert ("it is no regular file" if kind == "a pipe" else "it is a link, and links are not followed") in said


@pytest.mark.parametrize("name", ["manifest.json", "__0_0.distcp", "config.toml", "plugins.json"])
def test_links_in_an_older_checkpoint_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "old"
    path.mkdir()
    for file in (FORMATS / "2").iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    (path / name).rename(tmp_path / "elsewhere")
    (path / name).symlink_to(tmp_path / "elsewhere")
    assert f"{name}" in refused(path)


def test_an_export_follows_no_link(ours: Path, tmp_path: Path) -> None:
    path = checkpoint.resolve(tmp_path)
    (tmp_path / "secret").write_text(SECRET)
    (path / "tokenizer" / ".hidden").symlink_to(tmp_path / "secret")
    with pytest.raises(Exception, match="it is a link, and links are not followed"):
        export_dcp(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- the index ------------------------------------------------------------------------------------


def changed(path: Path, change: Callable[[Any], object]) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def entry(**values: object) -> Callable[[Any], object]:
    return lambda metadata: vars(metadata.state_dict_metadata["a"]).update(values)


def info(**values: object) -> Callable[[Any], object]:
    return lambda metadata: vars(metadata.storage_data[MetadataIndex("a", torch.Size([0, 0]))]).update(values)


def chunk(offsets: list[int], sizes: list[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def in_one_place(metadata: Any) -> None:
    a, b = (metadata.storage_data[MetadataIndex(name, torch.Size([0, 0]))] for name in ("a", "b"))
    vars(b).update(vars(a))


def overlapping(metadata: Any) -> None:
    metadata.state_dict_metadata["a"].chunks = [chunk([0, 0], [4, 8]), chunk([2, 0], [4, 8])]
    metadata.storage_data[MetadataIndex("a", torch.Size([2, 0]))] = _StorageInfo("__0_0.distcp", 0, 4)


def of_dtype(dtype: torch.dtype) -> Callable[[Any], object]:
    return lambda metadata: setattr(metadata.state_dict_metadata["a"].properties, "dtype", dtype)


INDEXES: dict[str, tuple[Callable[[Any], object], str]] = {
    "a chunk left out": (
        entry(chunks=[chunk([0, 0], [4, 8])]),
        "declares shards that do not add up to the tensor: 'a'",
    ),
    "no chunks": (entry(chunks=[]), "declares shards that do not add up to the tensor: 'a'"),
    "chunks that overlap": (overlapping, "declares shards that overlap: 'a'"),
    "a chunk outside": (entry(chunks=[chunk([0, 0], [9, 8])]), "declares a shard that does not lie in the tensor: 'a'"),
    "a chunk nowhere": (entry(chunks=[chunk([0, 0], [4, 8]), chunk([4, 0], [4, 8])]), "'a' at [4, 0] is in no file"),
    "a larger tensor": (entry(size=torch.Size([1 << 40, 8])), "declares shards that do not add up to the tensor: 'a'"),
    "a tensor larger than its bytes": (
        entry(size=torch.Size([1 << 20, 1 << 20]), chunks=[chunk([0, 0], [1 << 20, 1 << 20])]),
        "has 4,398,046,511,104 bytes of 'a' lie in",
    ),
    "a shape beyond all numbers": (entry(size=torch.Size([2**62, 2**62, 0]), chunks=[]), "is too large for any tensor"),
    "other dimensions": (entry(chunks=[chunk([0], [64])]), "'a' has another number of dimensions than its 2"),
    "a negative size": (entry(size=[-1, 8]), "a shape or place of 'a' is no list of counts"),
    "text for a size": (entry(size="88"), "a shape or place of 'a' is no list of counts"),
    "no properties": (entry(properties=None), "'a' has no properties"),
    "text for chunks": (entry(chunks="ab"), "'a' has no list of chunks"),
    "a quantized tensor": (of_dtype(torch.qint8), "'a' is quantized (qint8), which is not read"),
    "compressed values": (
        info(transform_descriptors=["stream.zstd/1"]),
        "'a' was written with an extension, such as for",
    ),
    "a negative place": (info(offset=-1), "a chunk of 'a' is at no place of a file"),
    "a place beyond the file": (info(offset=1 << 40), "has a shard of 'a' end at byte 1,099,5"),
    "a file elsewhere": (info(relative_path="/etc/passwd"), "names '/etc/passwd', which is no file of tensors in the"),
    "a file above": (
        info(relative_path="../x"),
        "names '../x', which is no file of tensors in the checkpoint's folder",
    ),
    "a file of no name": (info(relative_path=""), "names '', which can't be read: it is no regular file"),
    "a file of an odd name": (info(relative_path="a\0b"), "which is no file of tensors in the checkpoint's folder"),
    "a file that is not there": (info(relative_path="x"), "names 'x', which can't be read: No such file"),
    "two tensors in one place": (in_one_place, "has two shards at byte"),
    "a number for a name": (
        lambda metadata: metadata.state_dict_metadata.update({1: metadata.state_dict_metadata["a"]}),
        "it has something else than names for keys",
    ),
    "a place for a tensor": (
        lambda metadata: metadata.state_dict_metadata.update(a=_StorageInfo("x", 0, 1)),
        "it has a _StorageInfo, not a TensorStorageMetadata",
    ),
    "no table of files": (lambda metadata: setattr(metadata, "storage_data", None), "it has a NoneType, not a table"),
}


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_that_lies(theirs: Path, name: str) -> None:
    changed(theirs, INDEXES[name][0])
    said = refused(theirs)
    assert INDEXES[name][1] in said
    assert f"{theirs}/.metadata: " in said


def test_chunks_of_nothing_are_left_out(tmp_path: Path) -> None:
    """As a shard of FSDP is that holds no row."""
    dcp.save({"a": torch.ones(2, 3), "b": torch.ones(0, 3)}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    changed(tmp_path / "theirs", lambda one: one.state_dict_metadata["a"].chunks.append(chunk([2, 0], [0, 3])))
    import_dcp(tmp_path / "theirs", tmp_path / "ours")
    read = checkpoint.load(tmp_path / "ours", {}, ALONE)["model"]
    assert torch.equal(read["a"], torch.ones(2, 3))
    assert read["b"].shape == (0, 3)


def test_a_tensor_in_chunks_is_put_together(tmp_path: Path) -> None:
    full, folder = torch.arange(24.0).reshape(4, 6), tmp_path / "theirs"
    boxes = [(slice(0, 1), slice(0, 6)), (slice(1, 4), slice(0, 2)), (slice(1, 4), slice(2, 6))]
    dcp.save({f"{n}": full[box].clone() for n, box in enumerate(boxes)}, checkpoint_id=folder, no_dist=True)

    def joined(metadata: Metadata) -> None:
        parts = [metadata.state_dict_metadata[f"{n}"] for n in range(3)]
        assert isinstance(parts[0], TensorStorageMetadata)
        chunks = [chunk([one.start for one in box], [one.stop - one.start for one in box]) for box in boxes]
        places = {
            MetadataIndex("w", one.offsets): metadata.storage_data[MetadataIndex(f"{n}", torch.Size([0, 0]))]
            for n, one in enumerate(chunks)
        }
        metadata.state_dict_metadata = {"w": TensorStorageMetadata(parts[0].properties, full.shape, chunks)}
        metadata.storage_data = places

    changed(folder, joined)
    read = {"w": torch.zeros(4, 6)}
    dcp.load(read, checkpoint_id=folder, no_dist=True)
    assert torch.equal(read["w"], full), "torch reads it too"
    import_dcp(folder, tmp_path / "ours")
    assert torch.equal(checkpoint.load(tmp_path / "ours", {}, ALONE)["model"]["w"], full)


PREFIX = b"ctorch.distributed.checkpoint.metadata\n"
PICKLES = {
    "an attribute of a class": (
        PREFIX + b"Metadata\n(NX\x07\0\0\0version}X\x07\0\0\0versionX\1\0\0\0xs\x86b.",
        "changes",
    ),
    "an attribute of a class, in slots": (PREFIX + b"Metadata\nN}X\x07\0\0\0versionX\1\0\0\0xs\x86b.", "it changes"),
    "an attribute of a function": (b"ctorch.serialization\n_get_layout\nN}X\1\0\0\0aNs\x86b.", "it changes something"),
    "an attribute of a dtype": (b"ctorch\nfloat32\nN}X\1\0\0\0aNs\x86b.", "it changes something else than an object"),
    "a call of a record": (PREFIX + b"Metadata\n)R)R.", "it calls something else than a class"),
    "a call of a dtype": (b"ctorch\nfloat32\n)R.", "it calls something else than a class"),
    "a memo of billions": (b"\x80\x04Nr\xfe\xff\xff\xff.", "it has a NoneType, not a Metadata"),
    "a tuple of tuples as a key": (b"}" + b"K\0" + b"2\x86" * 60 + b"K\1s.", "not an index"),
    "a set": (b"\x80\x04\x8f.", "not an index of torch.distributed.checkpoint: KeyError"),
    "an object of another class": (b"cpathlib\nPosixPath\n)\x81.", "it has a PosixPath, not a Metadata"),
    "a class": (PREFIX + b"Metadata\n.", "it has a _Name, not a Metadata"),
    "an object without a state": (PREFIX + b"Metadata\n)\x81.", "it has a NoneType, not a table"),
}


@pytest.mark.parametrize("name", PICKLES)
def test_a_pickle_changes_nothing_and_calls_nothing(theirs: Path, name: str) -> None:
    data, problem = PICKLES[name]
    (theirs / ".metadata").write_bytes(data)
    said = refused(theirs)
    assert problem in said
    assert f"{theirs}/.metadata: not an index of torch.distributed.checkpoint: " in said
    assert vars(Metadata)["version"] is None
    assert not hasattr(torch.serialization._get_layout, "a")


def test_values_that_are_no_tensors_are_not_read(theirs: Path, tmp_path: Path) -> None:
    """torch reads them without `weights_only`."""
    victim = tmp_path / "touched"

    class Touches:
        def __reduce__(self) -> Any:
            return Path.touch, (victim,)

    torch.save(Touches(), theirs / "harmful")
    place = _StorageInfo("harmful", 0, (theirs / "harmful").stat().st_size)

    def bytes_too(metadata: Any) -> None:
        for name in ("optimizer", "train_state"):
            metadata.state_dict_metadata[name] = BytesStorageMetadata()
            metadata.storage_data[MetadataIndex(name)] = place

    changed(theirs, bytes_too)
    import_dcp(theirs, tmp_path / "imported")
    assert not victim.exists()


# -- the tensors ----------------------------------------------------------------------------------


def saved_as(path: Path, tensor: object) -> None:
    """Put something else where the index has the tensor `a`."""
    torch.save(tensor, path / "odd.distcp")
    length = (path / "odd.distcp").stat().st_size
    changed(path, info(relative_path="odd.distcp", offset=0, length=length))


VALUES = {
    "another shape": (
        torch.ones(4, 16),
        "'a' can't be read: it is [4, 16] of torch.float32 and [8, 8] of torch.float32",
    ),
    "another dtype": (
        torch.ones(8, 8, dtype=torch.int32),
        "it is [8, 8] of torch.int32 and [8, 8] of torch.float32 by",
    ),
    "a wider dtype": (torch.ones(8, 8, dtype=torch.float64), "it is [8, 8] of torch.float64 and [8, 8] of torch.float"),
    "a sparse tensor": (torch.ones(8, 8).to_sparse(), "it is no plain tensor"),
    "a parameter": (torch.nn.Parameter(torch.ones(8, 8)), "it is no plain tensor"),
    "a tensor without values": (torch.ones(8, 8, device="meta"), "it is no plain tensor"),
    "a list": ([torch.ones(8, 8)] * 2, "it is no plain tensor"),
    "a number": (5.0, "can't be read"),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_file_that_holds_something_else(theirs: Path, name: str) -> None:
    saved_as(theirs, VALUES[name][0])
    with (theirs / "odd.distcp").open("ab") as file:
        file.write(bytes(1000))  # so that it is long enough for the tensor
    changed(theirs, info(length=(theirs / "odd.distcp").stat().st_size))
    said = refused(theirs)
    assert f"{theirs}/odd.distcp: 'a' can't be read" in said
    assert VALUES[name][1] in said


def test_values_that_swell_are_not_read(theirs: Path) -> None:
    torch.save(torch.zeros(8, 8), theirs / "plain")
    with zipfile.ZipFile(theirs / "plain") as plain, zipfile.ZipFile(theirs / "odd.distcp", "w") as odd:
        for one in plain.infolist():
            odd.writestr(one.filename, plain.read(one), zipfile.ZIP_DEFLATED)
    changed(theirs, info(relative_path="odd.distcp", offset=0, length=(theirs / "odd.distcp").stat().st_size))
    assert "'a' can't be read by torch with weights_only: its values are compressed" in refused(theirs)


FULL = {
    "as the index has it": ({"a": torch.arange(64.0).reshape(8, 8)}, ""),
    "another dtype": (
        {"a": torch.ones(8, 8, dtype=torch.int32)},
        "'a' can't be read: its shape, dtype or place is not",
    ),
    "another shape": (
        {"a": torch.ones(4, 16)},
        "'a' can't be read: its shape, dtype or place is not that of the index",
    ),
    "another name": ({"x": torch.ones(8, 8)}, "'a' can't be read: its shape, dtype or place is not that of the index"),
}


@pytest.mark.parametrize("name", FULL)
def test_a_full_tensor_of_an_older_checkpoint(ours: Path, tmp_path: Path, name: str) -> None:
    tensors, problem = FULL[name]
    file = ours / "model-00001-of-00001.safetensors"
    save_file(tensors, file)
    place = _StorageInfo(file.name, file.stat().st_size - 256, 256)
    changed(ours, lambda one: one.storage_data.update({MetadataIndex("model.a", torch.Size([0, 0])): place}))
    if problem:
        assert problem in refused(ours)
        return
    import_dcp(ours, tmp_path / "imported")
    assert torch.equal(checkpoint.load(tmp_path / "imported", {}, ALONE)["model"]["a"], tensors["a"])


# -- the state ------------------------------------------------------------------------------------


STATES: dict[str, tuple[dict[str, Any], str]] = {
    "text for a base": ({"base": "x"}, "'base' is a text"),
    "a base without a path": ({"base": {"digest": "x"}}, "'base' lacks 'path'"),
    "a base of numbers": ({"base": {"path": 1, "digest": 2}}, "'path' of 'base' is a number"),
    "text for a step": ({"step": "x"}, "'step' is 'x', which is no count"),
    "a negative step": ({"step": -5}, "'step' is '-5', which is no count"),
    "a step with a point": ({"step": 1.5}, "'step' is '1.5', which is no count"),
    "a list for progress": ({"progress": []}, "'progress' is a list"),
    "text for a format": ({"format": "x"}, "'format' is 'x'"),
    "a format of nothing": ({"format": 0}, "'format' is '0'"),
    "a tensor of another place": (
        {"model": {"a": {"$tensor": "model.b"}, "b": {"$tensor": "model.a"}}},
        "names the tensor 'model.b' at the place of 'model.a'",
    ),
    "a tensor that is not there": (
        {"model": {"x": {"$tensor": "model.x"}}},
        "names the tensor 'model.x', which is not",
    ),
    "a number for a tensor": ({"model": {"a": {"$tensor": 1}}}, "names the tensor '1', which is not in it"),
    "a tensor at the top": ({"$tensor": "model.a"}, "'$tensor' or '$tuple' is where none can be"),
    "a number for a tuple": ({"optimizer": {"betas": {"$tuple": 3}}}, "'$tensor' or '$tuple' is where none can be"),
    "text for where it is from": ({"imported": "x"}, "'imported' is a text"),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_no_checkpoint_has(ours: Path, name: str) -> None:
    held = json.loads((ours / "state.json").read_text())
    values, problem = STATES[name]
    (ours / "state.json").write_text(json.dumps({**held, **values}))
    said = refused(ours)
    assert f"{ours}/state.json: " in said
    assert problem in said


@pytest.mark.parametrize("name", [name for name in STATES if "format" not in name])
def test_a_state_of_this_format_that_no_checkpoint_has(ours: Path, tmp_path: Path, name: str) -> None:
    path = checkpoint.resolve(tmp_path)
    held = json.loads((path / "state.json").read_text())
    values, problem = STATES[name]
    (path / "state.json").write_text(json.dumps({**held, **values}))
    with pytest.raises(ConfigError) as caught:
        checkpoint.load(reseal(path), {}, ALONE)
    assert f"{path}: state.json " in str(caught.value)
    assert problem in str(caught.value)


MANIFESTS: dict[str, tuple[Callable[[Any], object], str]] = {
    "text for what may be edited": (lambda m: m.update(editable="abc"), "'editable' holds something else than config"),
    "a state that may be edited": (lambda m: m.update(editable=["state.json"]), "'editable' holds something else than"),
    "a file elsewhere": (lambda m: m["files"].update({"/etc/passwd": m["files"]["state.json"]}), "names '/etc/passwd'"),
    "a file above": (
        lambda m: m["files"].update({"../x": m["files"]["state.json"]}),
        "it names '../x', which is not in",
    ),
    "a file of an odd name": (lambda m: m["files"].update({"a\0b": m["files"]["state.json"]}), "which is not in this"),
    "a size that is none": (
        lambda m: m["files"]["state.json"].update(bytes="x"),
        "'state.json' is not as it was saved",
    ),
    "a list": (lambda m: m.update(files=[]), "manifest.json: can't be read"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_lies(tmp_path: Path, name: str) -> None:
    path = tmp_path / "old"
    path.mkdir()
    for file in (FORMATS / "2").iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    manifest = json.loads((path / "manifest.json").read_text())
    MANIFESTS[name][0](manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert MANIFESTS[name][1] in refused(path)
