"""Tar files of samples: the same batches as from files, plain or packed; and what mistakes are told."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from forge_train import ConfigError
from forge_train_kit.data.files import find
from forge_train_kit.data.formats import lookup
from forge_train_plugins.data.multimodal import Multimodal
from items_data import encoded, job, same, scan, write_records

pytestmark = [pytest.mark.unit]

SIZES = (2, 1, 3)


def tar(path: Path, *members: tuple[str, bytes]) -> Path:
    with tarfile.open(path, "w") as file:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return path


def shard(folder: Path) -> Path:
    first = ("train/000.scan", encoded(scan(0, 2))), ("train/000.txt", b"a<scan>")
    second = (
        ("train/001.json", json.dumps({"text": "<scan>b<scan>", "id": 3}).encode()),
        *((f"train/001.{at}.scan", encoded(scan(at + 1, SIZES[at + 1]))) for at in range(2)),
    )
    return tar(folder / "shard.tar", *first, *second, ("train/002.txt", b"only text"))


def batches(path: Path, folder: Path) -> list[Any]:
    config = Multimodal.Config(path=str(path), cache=str(folder / "cache"), held_out=0.0, shuffle=False, packing="pad")
    loader = Multimodal(config).build_data(job(micro_batch=1), "train")
    return [next(loader) for _ in range(3)]


def test_a_tar_gives_the_batches_of_files(tmp_path: Path) -> None:
    for number, size in enumerate(SIZES):
        (tmp_path / f"{number}.npy").write_bytes(encoded(scan(number, size)))
    given = [
        {"text": "a<scan>", "scans": ["0.npy"]},
        {"text": "<scan>b<scan>", "scans": ["1.npy", "2.npy"]},
        {"text": "only text"},
    ]
    expected = batches(write_records(tmp_path / "data.jsonl", given), tmp_path)
    path = shard(tmp_path)
    packed = tmp_path / "packed.tar.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    for one in (path, packed):
        assert all(same(*pair) for pair in zip(batches(one, tmp_path), expected, strict=True))
    kept = list(tmp_path.rglob("*.items"))
    assert len(kept) == 1  # of the packed one


def test_kinds_of_items_have_their_names(tmp_path: Path) -> None:
    path = tar(tmp_path / "x.tar", ("a.b/0.JPG", b"12"), ("a.b/0.mp4", b"3"), ("a.b/0.wav", b"4"), ("a.b/1.cls", b"5"))
    ((file,), reader) = find(str(path), key="path"), lookup("tar", "x")
    (part,) = reader.parts(file)
    found = list(reader.read(file, part))
    assert [place for place, _ in found] == ["sample a.b/0", "sample a.b/1"]
    assert {name: [one["size"] for one in items] for name, items in found[0][1].items()} == {
        "image": [2],
        "video": [1],
        "audio": [1],
    }
    offset = found[0][1]["image"][0]["offset"]
    assert path.read_bytes()[offset : offset + 2] == b"12"


@pytest.mark.parametrize(
    ("members", "cut", "says"),
    [
        ((("0.txt", b"\xff"),), None, "member 0.txt: not UTF-8"),
        ((("0.json", b"{"),), None, "member 0.json: not JSON"),
        ((("0.json", b"[1]"),), None, "member 0.json: not an object but a list"),
        ((("0.txt", b"a"), ("1.txt", b"b" * 2000)), 2000, "is cut off, damaged or no tar file"),
        ((("0.txt", b"a"),), 100, "is cut off, damaged or no tar file"),
        ((("0.txt", b"a<scan>"), ("0.scan", b"broken")), None, "shard.tar, sample 0"),
    ],
)
def test_a_mistake_is_told_by_file_and_sample(
    tmp_path: Path, members: tuple[tuple[str, bytes], ...], cut: int | None, says: str
) -> None:
    path = tar(tmp_path / "shard.tar", *members)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ConfigError) as error:
        batches(path, tmp_path)
    assert says in str(error.value)
    assert str(path) in str(error.value)
