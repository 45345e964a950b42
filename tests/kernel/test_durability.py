"""The order in which a save reaches the disk: what a rename or a removal relies on is flushed before."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from forge_train.checkpoint import writing
from forge_train.checkpoint.seal import ALONE
from forge_train.checkpoint.writing import prune
from forge_train_kit.full_tensors import INDEX
from saving import save_step

pytestmark = [pytest.mark.unit]


class Disk:
    """Knows what was flushed, as it was then."""

    def __init__(self, checkpoints: Path) -> None:
        self.checkpoints = checkpoints
        self.flushed: dict[Path, tuple[int, int]] = {}
        self.unflushed_names: list[str] = []
        """Checkpoints whose names a power cut could still take."""
        self.lost: list[str] = []
        """What it could take although something relied on it."""
        self.done: list[str] = []

    def flush(self, path: Path) -> None:
        self.flushed[path] = self.now(path)
        if path == self.checkpoints:
            self.unflushed_names.clear()

    @staticmethod
    def now(path: Path) -> tuple[int, int]:
        """What changes when a file is written to, or an entry of a folder made."""
        return path.stat().st_mtime_ns, path.stat().st_size

    def move(self, old: Path, new: Path) -> None:
        self.done.append(f"{old.name} → {new.name}")
        if new.name.endswith(".removed"):
            self.lost += self.unflushed_names  # an older checkpoint goes: its successor must be there
            return
        inside = [old, *old.rglob("*")]
        self.lost += [str(path) for path in inside if self.flushed.get(path) != self.now(path)]
        for path in inside:
            self.flushed[new / path.relative_to(old)] = self.flushed.pop(path, (0, 0))
        if new.parent == self.checkpoints and new.name.startswith("step-"):
            self.unflushed_names.append(new.name)


@contextmanager
def watched(checkpoints: Path) -> Iterator[Disk]:
    disk, real_fsync, real_replace, real_rmtree = Disk(checkpoints), os.fsync, os.replace, shutil.rmtree

    def fsync(handle: int) -> None:
        real_fsync(handle)
        disk.flush(Path(f"/proc/self/fd/{handle}").readlink())

    def replace(old: str | Path, new: str | Path) -> None:
        disk.move(Path(old), Path(new))
        real_replace(old, new)

    def rmtree(path: Path, **more: bool) -> None:
        disk.done.append(f"rm {path.name}")
        real_rmtree(path, **more)

    with patch("os.fsync", fsync), patch("os.replace", replace), patch("shutil.rmtree", rmtree):
        yield disk


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="the names of open files are read from /proc")
@pytest.mark.parametrize("form", ["sharded", "safetensors", "both"])
def test_everything_is_flushed_before_it_is_relied_on(tmp_path: Path, form: Any) -> None:
    checkpoints, beside = tmp_path / "checkpoints", tmp_path / "tokenizer"
    beside.mkdir()
    (beside / "vocab.json").write_text("{}", encoding="utf-8")
    checkpoints.mkdir()
    state = {"model": {"a": torch.ones(100), "b": torch.ones(3)}}
    save_step(checkpoints, 1, state, ALONE, beside=[beside], form=form)
    with watched(checkpoints) as disk:
        save_step(checkpoints, 2, state, ALONE, beside=[beside], form=form)
        list(prune(checkpoints, 1, 0))
    index = [f".{INDEX}.partial → {INDEX}"] if form != "sharded" else []
    assert disk.done == [
        "rm .step-00000002.partial",
        *index,
        ".tensors.json.partial → tensors.json",
        ".state.json.partial → state.json",
        ".manifest.json.partial → manifest.json",
        ".step-00000002.partial → step-00000002",
        "rm .step-00000002.replaced",
        ".latest.partial → latest",
        "step-00000001 → .step-00000001.removed",
        "rm .step-00000001.removed",
    ]
    assert disk.lost == []


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="the names of open files are read from /proc")
def test_a_flush_that_is_left_out_is_noticed(tmp_path: Path) -> None:
    """What the test above is worth."""
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    with patch.object(writing, "sync", lambda folder: None), watched(checkpoints) as disk:
        save_step(checkpoints, 1, {"a": torch.ones(2)}, ALONE, beside=[])
        save_step(checkpoints, 2, {"a": torch.ones(2)}, ALONE, beside=[])
        list(prune(checkpoints, 1, 0))
    assert disk.lost == ["step-00000001", "step-00000002"]
