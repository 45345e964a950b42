"""Checkpoints elsewhere as any plugin may keep them: the hook `checkpoint_copies`."""

from __future__ import annotations

import shutil
from collections.abc import Set
from pathlib import Path
from typing import Any

import pytest

import toys
from forge_train import ConfigError, Plugin, hookimpl
from forge_train_kit.stores.elsewhere import CheckpointCopies
from forge_train_tools.checkpoint_policy import CheckpointPolicy

pytestmark = pytest.mark.unit


made: list[Attic] = []


class Attic(CheckpointCopies):
    """Keeps every checkpoint of a run in a folder beside the runs."""

    def __init__(self, run: Path) -> None:
        made.append(self)
        self.copied: list[int] = []
        self.looked, self.waited = 0, False
        self.here, self.there = run / "checkpoints", run.parent / "attic" / run.name

    @property
    def everywhere(self) -> Set[int]:
        return {int(path.name[5:]) for path in self.there.glob("step-*")}

    def taken(self) -> bool:
        return self.there.exists()

    def bring(self, *, after: int = -1, before: int = 2**31) -> Path | None:
        if not (steps := [step for step in self.everywhere if after < step < before]):
            return None
        name = f"step-{max(steps):08d}"
        return Path(shutil.copytree(self.there / name, self.here / name))

    def send(self, spared: Set[int] = frozenset()) -> None:
        for path in sorted(self.here.glob("step-*")):
            if int(path.name[5:]) not in self.everywhere:
                shutil.copytree(path, self.there / path.name)
                self.copied.append(int(path.name[5:]))

    def look(self) -> Set[int]:
        self.looked += 1
        return {1} if self.looked == 2 else set()

    def wait(self) -> Set[int]:
        self.waited = True
        return set()


class KeepsAll(Plugin):
    layout = True

    @hookimpl
    def checkpoint_copies(self, config: Any, run: Path) -> CheckpointCopies:
        return Attic(run)


CONFIG = {"checkpoint.every": 1, "checkpoint.keep": 1}


def test_a_plugin_keeps_checkpoints_in_a_place_of_its_own_and_brings_them_back(tmp_path: Path) -> None:
    run = toys.run(tmp_path, KeepsAll, name="a", steps=3, config=CONFIG)
    attic = tmp_path / "attic" / "a"
    assert run.finished.outcome == "done"
    assert (made[-1].copied, made[-1].looked, made[-1].waited) == ([1, 2, 3], 3, True)
    shutil.rmtree(tmp_path / "a")
    again = toys.run(tmp_path, KeepsAll, name="a", steps=5, config=CONFIG)
    assert [line["step"] for line in again.metrics] == [4, 5]
    assert sorted(path.name[-1] for path in attic.iterdir()) == ["1", "2", "3", "4", "5"]


def test_a_checkpoint_that_is_removed_there_is_no_longer_one_of_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[int] = []
    monkeypatch.setattr(CheckpointPolicy, "removed", lambda policy, step: removed.append(step))
    toys.run(tmp_path, KeepsAll, name="a", steps=3, config={"checkpoint.every": 1, "checkpoint.keep": 9})
    assert removed == [1]


def test_two_plugins_do_not_both_keep_copies(tmp_path: Path) -> None:
    class Other(KeepsAll):
        pass

    with pytest.raises(ConfigError, match="Plugins 'keeps_all' and 'other' both answer checkpoint_copies"):
        toys.run(tmp_path, KeepsAll, Other)


@pytest.mark.parametrize("key", ["folder", "mirror"])
def test_a_place_that_no_plugin_copies_to_is_an_error(tmp_path: Path, key: str) -> None:
    config = {**toys.SMALL, f"checkpoint.{key}": str(tmp_path / "there")}
    with pytest.raises(ConfigError, match=rf"checkpoint\.{key}: no enabled plugin makes copies; add --plugins copies"):
        toys.run_forge(list(toys.TOYS), config, preset="", folder=tmp_path)
