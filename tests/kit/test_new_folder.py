"""A folder that a command makes: one process writes it, and nothing that is there already is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import chat_model
from forge_cli import forge, one_message
from forge_train import ConfigError
from forge_train.checkpoint.seal import check
from forge_train_kit.hf.folder import Folder
from forge_train_kit.lock import Owner
from forge_train_kit.new_folder import claimed
from forge_train_tools.offline.convert import convert_folder
from forge_train_tools.offline.hf_import import import_checkpoint
from forge_train_tools.offline.huggingface import export_checkpoint

pytestmark = pytest.mark.unit
WRITERS = ("import", "convert", "export")


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    chat_model.write_model(tmp_path / "hf")
    return tmp_path / "hf"


def writer(name: str, hf: Path) -> Callable[[Path], Any]:
    """A function that writes a target."""
    if name == "export":
        import_checkpoint(hf, hf.with_name("start"))
        return lambda target: export_checkpoint(hf.with_name("start"), target)
    return lambda target: {"import": import_checkpoint, "convert": convert_folder}[name](hf, target)


def during(monkeypatch: pytest.MonkeyPatch, do: Callable[[], None]) -> None:
    """Do something when the next tensor is read."""
    read = Folder.read

    def reading(self: Folder, *args: Any) -> Tensor:
        monkeypatch.setattr(Folder, "read", read)
        do()
        return read(self, *args)

    monkeypatch.setattr(Folder, "read", reading)


@pytest.mark.parametrize("name", ["import", "convert"])
def test_the_second_of_two_writers_is_refused_and_the_first_one_s_folder_is_whole(
    name: str, hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, refused = writer(name, hf), []

    def second() -> None:
        with pytest.raises(ConfigError) as caught:
            write(tmp_path / "here" / "out")
        refused.append(str(caught.value))

    during(monkeypatch, second)
    write(tmp_path / "here" / "out")
    (message,) = refused
    assert f"out: process {os.getpid()} on" in message
    assert "is writing it. Wait until it ends, or name a new folder." in message
    assert [file.name for file in (tmp_path / "here").iterdir()] == ["out"]
    assert name == "convert" or check(tmp_path / "here" / "out", contents=True) == ""


def test_what_another_program_writes_meanwhile_is_not_lost(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "here" / "out"

    def another() -> None:
        out.mkdir()
        (out / "thesis.tex").write_text("…")

    during(monkeypatch, another)
    with pytest.raises(ConfigError, match="out exists and is not empty"):
        import_checkpoint(hf, out)
    assert [file.name for file in (tmp_path / "here").rglob("*")] == ["out", "thesis.tex"]


def test_what_a_killed_process_left_is_no_obstacle(hf: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    (here / ".out.partial").mkdir(parents=True)
    (here / ".out.partial" / "model.safetensors").write_bytes(b"half")
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (here / ".out.claim").mkdir()
    (here / ".out.claim" / ".lock.1").write_text(json.dumps(asdict(replace(Owner.here(), pid=dead.pid, started="0"))))
    import_checkpoint(hf, here / "out")
    assert [file.name for file in here.iterdir()] == ["out"]


@pytest.mark.parametrize("name", WRITERS)
def test_a_link_to_an_empty_folder_is_followed(name: str, hf: Path, tmp_path: Path) -> None:
    write = writer(name, hf)
    real, link = tmp_path / "disk" / "real", tmp_path / "link"
    real.mkdir(parents=True)
    link.symlink_to(real, target_is_directory=True)
    assert write(link).path == link
    assert link.is_symlink()
    assert (real / ("config.toml" if name == "import" else "config.json")).is_file()
    assert [*real.parent.iterdir()] == [real]
    with pytest.raises(ConfigError, match="link exists and is not empty; name a new folder"):
        write(link)


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def circular(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (dangling, "out is a link to nowhere, which does not exist; name a new folder."),
        (circular, "out is a link to out, which does not exist; name a new folder."),
        (Path.touch, "out is a file; name a new folder."),
        (os.mkfifo, "out is no folder; name a new folder."),
    ],
)
def test_what_is_no_folder_is_told(
    name: str, make: Callable[[Path], None], message: str, hf: Path, tmp_path: Path
) -> None:
    write, out = writer(name, hf), tmp_path / "out"
    make(out)
    with pytest.raises(ConfigError) as caught:
        write(out)
    assert str(caught.value) == f"{tmp_path}/{message}"
    assert os.path.lexists(out)


def test_the_current_folder_is_refused(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for command in ("import", "convert"):
        told = one_message(forge("checkpoint", command, hf, "."), 2)
        assert told == ". is the current folder; name a new folder."


def test_a_link_and_its_folder_are_one_target(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with (
        claimed(tmp_path / "link"),
        pytest.raises(ConfigError, match=r"real: process \d+ on \S+ is writing it"),
        claimed(tmp_path / "real"),
    ):
        pass
