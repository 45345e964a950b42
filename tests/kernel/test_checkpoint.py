"""Checkpoints: whole or invisible, verified before they replace anything, kept as long as asked."""

from __future__ import annotations

import errno
import json
import logging
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from crossed import pairs
from forge_train import ConfigError, ForgeError
from forge_train.checkpoint import writing
from forge_train.checkpoint.checkpoint import (
    MANIFEST,
    check,
    found,
    load,
    newest,
    prune,
    read_state,
    resolve,
    shapes,
)
from forge_train.mesh.distributed import DistributedContext
from forge_train.mesh.layout import Layout
from forge_train.store.save_plan import Shards
from forge_train_kit import stored
from saving import save_step

pytestmark = pytest.mark.unit

ALONE = DistributedContext(Layout(), torch.device("cpu"))


def state(value: float = 1.0) -> dict[str, Any]:
    return {
        "model": {"layers.0.weight": torch.full((3, 2), value), "scalar": torch.tensor(value)},
        "optimizer": {"state": {"layers.0.weight": {"m": torch.full((3, 2), -value), "step": 5}}, "betas": (0.9, 0.99)},
        "progress": {"step": 1},
        "nothing": None,
    }


def write(folder: Path, step: int, value: float | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    return save_step(folder, step, state(step if value is None else value), ALONE, beside=[]).path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- written and read -----------------------------------------------------------------------------


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    beside = tmp_path / "config.toml"
    beside.write_text("x = 1\n", encoding="utf-8")
    saved = save_step(tmp_path / "c", 7, state(2.0), ALONE, beside=[beside])
    assert (saved.path, saved.step) == (tmp_path / "c" / "step-00000007", 7)
    assert names(tmp_path / "c") == ["latest", "step-00000007"]
    assert (tmp_path / "c" / "latest").read_text(encoding="utf-8") == "step-00000007\n"
    assert (saved.path / "config.toml").read_text(encoding="utf-8") == "x = 1\n"
    manifest = json.loads((saved.path / MANIFEST).read_text(encoding="utf-8"))["files"]
    assert manifest.keys() == {name for name in names(saved.path) if name != MANIFEST}
    assert saved.bytes == sum(entry["bytes"] for entry in manifest.values())
    assert check(saved.path, contents=True) == ""
    weight = torch.zeros(3, 2)
    back = load(saved.path, {"model.layers.0.weight": weight}, ALONE)
    assert back["model"]["layers.0.weight"] is weight
    assert weight.eq(2).all()
    assert back["optimizer"]["betas"] == (0.9, 0.99)
    assert back["optimizer"]["state"]["layers.0.weight"]["m"].eq(-2).all()
    assert back["model"]["scalar"] == 2
    assert back["nothing"] is None
    assert shapes(saved.path)["model.layers.0.weight"] == ((3, 2), torch.float32)


def test_only_a_part_can_be_read(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    assert set(load(path, {}, ALONE, only="model.")["tensors"]) == {"model.layers.0.weight", "model.scalar"}


def test_steps_sort_as_numbers(tmp_path: Path) -> None:
    for step in (9, 10, 123_456_789, 100):
        write(tmp_path, step)
    assert [saved.step for saved in found(tmp_path)] == [123_456_789, 100, 10, 9]
    assert newest(tmp_path).step == 123_456_789  # type: ignore[union-attr]


def test_what_is_no_checkpoint_is_not_found(tmp_path: Path) -> None:
    write(tmp_path, 3)
    for name in ("step-7", "step-0000000x", "other", ".step-00000009.partial"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000008").touch()
    assert [saved.step for saved in found(tmp_path)] == [3]
    assert found(tmp_path / "absent") == []
    assert newest(tmp_path / "absent") is None


# -- damage ---------------------------------------------------------------------------------------


def data_of(path: Path) -> Path:
    return next(path.glob("rank-*.safetensors"))


def flip(path: Path) -> None:
    content = bytearray(data_of(path).read_bytes())
    content[len(content) // 2] ^= 1
    data_of(path).write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (
        lambda path: data_of(path).write_bytes(data_of(path).read_bytes()[:-1]),
        "rank-00000-0.safetensors has ",
    ),
    "missing": (lambda path: data_of(path).unlink(), "rank-00000-0.safetensors is missing"),
    "empty manifest": (lambda path: (path / MANIFEST).write_text(""), "manifest.json can't be read"),
    "no manifest": (lambda path: (path / MANIFEST).unlink(), "manifest.json is missing"),
    "half a manifest": (lambda path: (path / MANIFEST).write_text('{"files": {"a"'), "manifest.json can't be read"),
    "another step": (
        lambda path: (path / MANIFEST).write_text((path / MANIFEST).read_text().replace('"step": ', '"step": 1')),
        "it is of step 1",
    ),
    "another manifest": (lambda path: (path / MANIFEST).write_text('{"files": ["a"]}'), "manifest.json can't be read"),
    "an empty list": (
        lambda path: (path / MANIFEST).write_text('{"files": {}}'),
        "manifest.json does not list state.json",
    ),
    "a file elsewhere": (
        lambda path: (path / MANIFEST).write_text((path / MANIFEST).read_text().replace("rank-", "../rank-")),
        "manifest.json names '../rank-00000-0.safetensors', which is not in this folder",
    ),
    "flipped": (flip, "rank-00000-0.safetensors has other contents than were saved"),
    "emptied": (lambda path: [file.unlink() for file in path.iterdir()], "manifest.json is missing"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_newest_falls_back_to_the_one_before(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, 1)
    path = write(tmp_path, 2)
    DAMAGE[damage][0](path)
    assert DAMAGE[damage][1] in check(path, contents=True)
    with caplog.at_level(logging.WARNING):
        assert newest(tmp_path).step == 1  # type: ignore[union-attr]
    (record,) = [record for record in caplog.records if record.name == "forge_train"]
    assert f"{path} is not whole ({DAMAGE[damage][1]}" in record.getMessage()
    with pytest.raises(ConfigError, match="not a whole checkpoint|neither a run nor a checkpoint"):
        resolve(path)
    write(tmp_path, 2, 5.0)  # and it is replaced when that step is saved again
    assert newest(tmp_path).step == 2  # type: ignore[union-attr]
    assert load(path, {}, ALONE)["model"]["scalar"] == 5


def test_changed_contents_are_found_where_they_are_looked_for(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    flip(path)
    assert check(path) == ""
    assert "rank-00000-0.safetensors has other contents than were saved" in check(path, contents=True)


def test_what_a_path_means(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match="has no whole checkpoint"):
        resolve(run)
    path = write(run / "checkpoints", 4)
    assert resolve(run) == path
    assert resolve(path) == path
    with pytest.raises(ConfigError, match="there is no such run or checkpoint"):
        resolve(tmp_path / "absent")


@pytest.mark.parametrize("text", ["", "[]", "5", '{"format": 2}', '{"format": 4}', '{"step": 1}', "{"])
def test_a_format_that_is_not_ours(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="format|not a checkpoint of forge"):
        read_state(tmp_path)


# -- whole or invisible ---------------------------------------------------------------------------


class KilledError(BaseException):
    """Stands for `kill -9`: nothing catches it."""


def calls_of_save() -> list[str]:
    """What `save` does to the disk, at any of which it may die."""
    return ["write", "write_json", "seal", "verify", "_publish", "sync", "write_whole", "rmtree", "replace"]


@pytest.mark.parametrize(("place", "after", "count"), pairs(calls_of_save(), [False, True], [1, 2]))
def test_killed_anywhere_inside_save_what_is_seen_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, after: bool, count: int
) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2)
    with monkeypatch.context() as patch:
        target: Any = {"write": Shards, "rmtree": shutil, "replace": Path}.get(place, writing)
        real, left = getattr(target, place), [count]

        def dies(*arguments: Any, **more: Any) -> Any:
            left[0] -= 1
            if left[0] == 0 and not after:
                raise KilledError
            result = real(*arguments, **more)
            if left[0] == 0:
                raise KilledError
            return result

        patch.setattr(target, place, dies)
        try:
            write(tmp_path, 3)
            list(prune(tmp_path, 1, 0))
            assert left[0] > 0
        except KilledError:
            pass
    for saved in found(tmp_path):
        assert check(saved.path, contents=True) == ""
        assert load(saved.path, {}, ALONE)["model"]["scalar"] == saved.step
    named = (tmp_path / "latest").read_text(encoding="utf-8").strip()
    assert check(tmp_path / named, contents=True) == ""
    steps = [saved.step for saved in found(tmp_path)]
    assert steps[0] in (2, 3)
    write(tmp_path, 4)  # and what was left is in nobody's way
    list(prune(tmp_path, 2, 0))
    assert [saved.step for saved in found(tmp_path)] == [4, steps[0]]
    assert not [name for name in names(tmp_path) if name.startswith(".step")]


def test_what_can_not_be_read_back_is_never_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1)
    real = writing.seal

    def rots(path: Path, *arguments: Any, **more: Any) -> int:
        size = real(path, *arguments, **more)
        flip(path)
        return size

    monkeypatch.setattr(writing, "seal", rots)
    with pytest.raises(
        ForgeError, match="what was saved can't be read back: rank-00000-0.safetensors has other contents"
    ) as caught:
        write(tmp_path, 2)
    assert caught.value.code == 1
    assert [saved.step for saved in found(tmp_path)] == [1]
    assert (tmp_path / "latest").read_text(encoding="utf-8") == "step-00000001\n"


def test_the_same_step_saved_again_is_never_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1, 1.0)
    monkeypatch.setattr(writing, "seal", lambda *arguments, **more: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write(tmp_path, 1, 2.0)
    assert load(tmp_path / "step-00000001", {}, ALONE)["model"]["scalar"] == 1


# -- full disks -----------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 300 KiB, where this process may make one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no tmpfs can be mounted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_leaves_the_previous_checkpoint_whole(small_disk: Path) -> None:
    small = {"a": torch.zeros(1000)}
    save_step(small_disk, 1, small, ALONE, beside=[])
    with pytest.raises(ForgeError) as caught:
        save_step(small_disk, 2, {"a": torch.zeros(100_000)}, ALONE, beside=[])
    assert re.fullmatch(
        rf"{small_disk}/step-00000002: can't save the checkpoint: it takes 391 KiB "
        rf"\(the disk at {small_disk} has .* of 300 KiB left\)\. The newest whole checkpoint is step-00000001\. "
        r"Make room there, then go on\.",
        str(caught.value),
    )
    assert caught.value.code == 1
    assert names(small_disk) == ["latest", "step-00000001"]
    assert check(small_disk / "step-00000001", contents=True) == ""
    save_step(small_disk, 3, small, ALONE, beside=[])


@pytest.mark.parametrize("place", ["write", "write_json", "seal", "_publish"])
def test_a_disk_that_refuses_is_told_in_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def refuse(*arguments: Any, **more: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Shards if place == "write" else writing, place, refuse)
        with pytest.raises(
            ForgeError, match=r"No space left on device \(the disk at .* There is no earlier checkpoint\."
        ):
            write(tmp_path, 1)
    assert names(tmp_path) == []


def test_another_failure_while_writing_is_raised_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(torch.Tensor):
        """Can't be written."""

        def __reduce_ex__(self, protocol: Any) -> Any:
            raise LookupError("not me")

    with pytest.raises(Exception) as caught:  # noqa: PT011  # whatever torch makes of it
        save_step(tmp_path, 1, {"a": torch.ones(2).as_subclass(Odd)}, ALONE, beside=[])
    assert isinstance(caught.value, Exception)
    assert found(tmp_path) == []


# -- pruning --------------------------------------------------------------------------------------


def kept(folder: Path, keep: int, keep_every: int) -> list[int]:
    list(prune(folder, keep, keep_every))
    return [saved.step for saved in found(folder)]


def test_the_newest_are_kept_and_every_so_often_one(tmp_path: Path) -> None:
    for step in range(1, 10):
        write(tmp_path, step)
    assert kept(tmp_path, 9, 0) == [9, 8, 7, 6, 5, 4, 3, 2, 1]
    assert kept(tmp_path, 3, 2) == [9, 8, 7, 6, 4, 2]
    assert kept(tmp_path, 2, 4) == [9, 8, 4]
    assert kept(tmp_path, 1, 0) == [9]


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_checkpoint_does_not_count(tmp_path: Path, damage: str) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step)
    DAMAGE[damage][0](tmp_path / "step-00000003")
    assert kept(tmp_path, 1, 0) == [3, 2]
    assert newest(tmp_path).step == 2  # type: ignore[union-attr]


def test_pruning_tells_what_went(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step)
    assert [saved.step for saved in prune(tmp_path, 1, 0)] == [2, 1]
    assert names(tmp_path) == ["latest", "step-00000003"]


def test_a_checkpoint_without_evaluation_weights_is_not_read_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, 1)

    def read(*_: object) -> None:
        raise AssertionError("all ranks would have to take part")

    monkeypatch.setattr(stored.tensors, "read", read)
    stored.take_evaluated(path, {"scalar": torch.ones(())}, ALONE)
