"""Tensors that are kept on disk: equal bits, a bound, and nothing that is not whole."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forge_train_kit.data import kept_tensors
from forge_train_kit.data.kept_tensors import KeptTensors

pytestmark = pytest.mark.unit

ROOM = 1 << 20


def tensor(number: int, size: int = 64) -> Tensor:
    return torch.full((size,), float(number))


def files(folder: Path) -> list[Path]:
    return [one for one in folder.rglob("*") if one.is_file() and one.name != ".kept-tensors"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_it_gives_back_the_same_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    given = torch.randn(7, 5).to(dtype)
    KeptTensors(tmp_path, "one", ROOM).put("ab12", given[:, 1:3])
    found = KeptTensors(tmp_path, "one", ROOM).get("ab12")
    assert found is not None
    assert found.dtype == dtype
    assert torch.equal(found, given[:, 1:3])
    assert KeptTensors(tmp_path, "one", ROOM).get("ab13") is None
    assert KeptTensors(tmp_path, "another", ROOM).get("ab12") is None


@pytest.mark.parametrize("damage", ["cut", "zeros", "empty", "another"])
def test_a_damaged_file_is_none_and_is_replaced(tmp_path: Path, damage: str) -> None:
    kept = KeptTensors(tmp_path, "one", ROOM)
    kept.put("ab", tensor(1))
    (file,) = files(tmp_path)
    content = file.read_bytes()
    file.write_bytes(
        {
            "cut": content[:-1],
            "zeros": content[:-64] + b"\0" * 64,
            "empty": b"",
            "another": b"no tensors at all",
        }[damage]
    )
    assert kept.get("ab") is None
    kept.put("ab", tensor(1))
    found = kept.get("ab")
    assert found is not None
    assert torch.equal(found, tensor(1))


def test_it_takes_no_more_bytes_than_it_may(tmp_path: Path) -> None:
    kept = KeptTensors(tmp_path, "one", 2000)
    for number in range(9):
        kept.put(f"{number:02}", tensor(number))
    assert kept.full
    there = sum(file.stat().st_size for file in files(tmp_path))
    size = there // len(files(tmp_path))
    assert 2000 - size < there <= 2000


def test_what_was_opened_least_recently_makes_room(tmp_path: Path) -> None:
    for age, name in enumerate(("oldest", "older"), -20):
        KeptTensors(tmp_path, name, 1400).put("ab", tensor(1))
        os.utime(tmp_path / f"{name}.tensors", (age + 1e9, age + 1e9))
    kept = KeptTensors(tmp_path, "mine", 1400)
    for number in range(2):
        kept.put(f"{number:02}", tensor(number))
    assert {one.parent.parent.stem for one in files(tmp_path)} == {"older", "mine"}
    assert not kept.full


def test_nothing_else_in_a_folder_is_removed(tmp_path: Path) -> None:
    """Somebody may choose any folder."""
    for file in (tmp_path / "photos" / "a.jpg", tmp_path / "size", tmp_path / "photos" / "old.part"):
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"x" * 5000)
        os.utime(file, (1e9, 1e9))
    kept = KeptTensors(tmp_path, "one", 1000)
    for number in range(9):
        kept.put(f"{number:02}", tensor(number))
    assert kept.full
    assert kept.get("00") is not None
    others = [file for file in files(tmp_path) if "one.tensors" not in file.parts]
    assert {file.read_bytes() for file in others} == {b"x" * 5000}
    assert len(others) == 3


def test_bytes_that_a_killed_process_took_come_back(tmp_path: Path) -> None:
    """It counted a file that it did not write, and left a part of another."""
    KeptTensors(tmp_path, "one", 1000).put("ab", tensor(1))
    (tmp_path / ".kept-tensors").write_text("999")
    part = tmp_path / "one.tensors" / "ab" / ".cd.safetensors.1.part"
    part.write_bytes(b"x" * 900)
    os.utime(part, (1e9, 1e9))
    kept = KeptTensors(tmp_path, "one", 1000)
    kept.put("cd", tensor(2))
    assert kept.get("cd") is not None
    assert len(files(tmp_path)) == 2


def _dies(folder: Path) -> None:
    """Write an item, and be killed before it has its name."""

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    Path.replace = die  # type: ignore[assignment,method-assign]
    KeptTensors(folder, "one", ROOM).put("ab", tensor(1))


def _writes(folder: Path, number: int) -> None:
    kept = KeptTensors(folder, "one", 20_000)
    for key in range(60):
        kept.put(f"{key:02}", tensor(key))
        found = kept.get(f"{key:02}")
        assert found is None or torch.equal(found, tensor(key)), number


def test_a_killed_writer_leaves_nothing_to_read(tmp_path: Path) -> None:
    child = multiprocessing.get_context("fork").Process(target=_dies, args=(tmp_path,))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    kept = KeptTensors(tmp_path, "one", ROOM)
    assert kept.get("ab") is None
    kept.put("ab", tensor(1))
    assert kept.get("ab") is not None


def test_processes_write_the_same_keys_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_writes, args=(tmp_path, number)) for number in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert sum(file.stat().st_size for file in files(tmp_path)) <= 20_000


def test_a_folder_that_can_not_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = KeptTensors(tmp_path / "file" / "cache", "one", ROOM)
    kept.put("ab", tensor(1))
    assert kept.get("ab") is None
    assert kept_tensors._size(tmp_path / "nowhere") == 0
