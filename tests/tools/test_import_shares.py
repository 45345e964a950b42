"""An import by several processes: the same checkpoint, each byte read once, one message where one of them fails."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import chat_model
import warm
from forge_train import ConfigError
from forge_train.checkpoint.seal import check
from forge_train.store.manifest import hash_of, hash_on_disk
from forge_train_kit.hf.folder import Folder
from forge_train_tools.offline.hf_files import fill_full
from forge_train_tools.offline.hf_import import _Asked, _Import, import_checkpoint

pytestmark = pytest.mark.unit


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    chat_model.write_model(tmp_path / "hf")
    return tmp_path / "hf"


def test_four_shares_read_each_byte_once_and_are_one_import(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_checkpoint(hf, tmp_path / "alone")
    read, count = Folder.read, Counter[str]()

    def counted(self: Folder, name: str, *box: Any) -> Tensor:
        count[name] += (part := read(self, name, *box)).nbytes
        return part

    monkeypatch.setattr(Folder, "read", counted)
    made = _Import.of(_Asked(str(hf), str(tmp_path / "shared"), (), (), (), "", (), ()))
    count.clear()
    (tmp_path / "shared").mkdir()
    made.files.create(tmp_path / "shared")
    shares = []
    for rank in range(4):
        before = count.total()
        fill_full(tmp_path / "shared", made.files, made.read, rank=rank, world=4)
        shares.append(count.total() - before)
    assert all(shares)
    assert count == {name: one.nbytes for name, one in load_file(hf / "model.safetensors").items()}
    for file in made.files.sizes:
        assert (tmp_path / "shared" / file).read_bytes() == (tmp_path / "alone" / file).read_bytes()


@pytest.mark.slow
def test_two_processes_make_the_checkpoint_of_one(hf: Path, tmp_path: Path) -> None:
    alone = import_checkpoint(hf, tmp_path / "alone")
    with warm.ranks():
        both = import_checkpoint(hf, tmp_path / "both", nproc=2)
    assert (both.parameters, both.files) == (alone.parameters, alone.files)
    assert check(tmp_path / "both", contents=True) == ""
    listed = [json.loads((one.path / "manifest.json").read_text())["files"] for one in (alone, both)]
    tensors = [{name: one for name, one in files.items() if name.endswith(".safetensors")} for files in listed]
    assert tensors[0] == tensors[1] != {}


@pytest.mark.slow
def test_one_that_fails_ends_all_with_one_message_and_leaves_nothing(hf: Path, tmp_path: Path) -> None:
    tensors = load_file(hf / "model.safetensors")
    tensors["model.norm.weight"][3] = 7e4
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "here").mkdir()
    with warm.ranks(), pytest.raises(ConfigError) as caught:
        import_checkpoint(hf, tmp_path / "here" / "narrow", dtype=torch.float16, nproc=2)
    assert str(caught.value).count("'norm.weight' has numbers beyond") == 1
    assert not any((tmp_path / "here").iterdir())


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, (4 << 20) + 5])
def test_what_is_read_past_the_cache_has_the_same_hash(tmp_path: Path, size: int) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"abc" * (size // 3) + b"d" * (size % 3))
    with file.open("rb+") as data:
        os.fsync(data.fileno())
        assert hash_on_disk(file) in (hash_of(data), None)  # None: on a file system in memory
