"""Two processes that copy, move or fetch a checkpoint to one place at once: one writes, and what it writes is whole."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_train import ConfigError
from forge_train.checkpoint.seal import ALONE, check
from forge_train_kit.stores.fetching import fetched
from forge_train_kit.stores.remote_folder import RemoteFolder
from forge_train_kit.stores.store import Store
from forge_train_tools.offline import relocate
from saving import save_step

pytestmark = [pytest.mark.unit]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    (tmp_path / "made").mkdir()
    return save_step(tmp_path / "made", 1, {"model": {"w": torch.ones(3)}}, ALONE, beside=[]).path


def meanwhile(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, do: Callable[[], object]) -> None:
    """Do something when a function is called for the first time."""
    real, calls = getattr(owner, name), []

    def calling(*arguments: Any, **more: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 1:
            do()
        return real(*arguments, **more)

    monkeypatch.setattr(owner, name, calling)


def refused(write: Callable[[], object], messages: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        write()
    messages.append(str(caught.value))


@pytest.mark.parametrize("address", ["", "local://"])
def test_the_second_of_two_copies_is_refused(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    messages: list[str] = []
    new = f"{address}{tmp_path / 'new'}"
    put = lambda: Store(f"{address}{tmp_path}").put(saved, "new")  # noqa: E731  # had seen no folder there before
    second = put if address else lambda: relocate.copy(str(saved), new)
    meanwhile(monkeypatch, RemoteFolder, "put" if address else "get", lambda: refused(second, messages))
    relocate.copy(str(saved), new)
    assert f"process {os.getpid()} on" in messages[0]
    assert "is writing it. Wait until it ends, or name a new folder." in messages[0]
    assert check(tmp_path / "new", contents=True) == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "new"]


def test_the_second_of_two_moves_to_another_disk_is_refused(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = save_step(tmp_path / "made", 2, {"model": {"w": torch.ones(3)}}, ALONE, beside=[]).path
    rename, messages = Path.rename, list[str]()

    def across(path: Path, new: Path) -> Path:
        if path.parent != Path(new).parent:
            raise OSError(errno.EXDEV, "another disk")
        return rename(path, new)

    monkeypatch.setattr(Path, "rename", across)
    new = tmp_path / "new"
    meanwhile(monkeypatch, relocate.shutil, "copytree", lambda: refused(lambda: relocate.move(other, new), messages))
    relocate.move(saved, new)
    assert "is writing it" in messages[0]
    assert check(new, contents=True) == ""
    assert (other.exists(), saved.exists()) == (True, False)


def test_a_folder_that_another_program_makes_meanwhile_is_not_lost(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = tmp_path / "new"

    def make() -> None:
        new.mkdir()
        (new / "mine").touch()

    meanwhile(monkeypatch, RemoteFolder, "get", make)
    with pytest.raises(ConfigError, match="exists and is not empty"):
        relocate.copy(str(saved), str(new))
    assert [path.name for path in new.iterdir()] == ["mine"]


def test_two_branches_share_what_is_fetched(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits for the first, and takes what it fetched."""
    runs, ended, second = tmp_path / "runs", list[str](), list[threading.Thread]()
    fetches: list[Path] = []
    real = Store._fetch

    def branch() -> None:
        ended.append(fetched(f"local://{saved}", runs))

    def fetch(self: Store, stored: Any, target: Path, **more: Any) -> Path:
        fetches.append(target)
        second.append(threading.Thread(target=branch))
        second[0].start()
        second[0].join(0.5)
        assert second[0].is_alive()
        return real(self, stored, target, **more)

    monkeypatch.setattr(Store, "_fetch", fetch)
    branch()
    second[0].join(60)
    assert ended[0] == ended[1] == str(fetches[0])
    assert len(fetches) == 1
    assert check(fetches[0], contents=True) == ""
