"""What a run is called, what it continues, and what its folder holds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import toys
from forge_train import ConfigError, Plugin, hookimpl
from forge_train.config import Config, Request
from forge_train.config.sections import RunSection
from forge_train.registry.setup import resolve
from forge_train.storage.run import Run, is_checkpoint, is_run, write_whole
from forge_train.storage.start import Start, begin
from forge_train.testing import installed

pytestmark = pytest.mark.unit


def config(name: str = "") -> Config:
    return Config(run=RunSection(name=name), source="mine")


def make_run(path: Path) -> Path:
    (path / "checkpoints").mkdir(parents=True)
    for file in ("config.toml", "plugins.json"):
        (path / file).touch()
    return path


# -- which folder ---------------------------------------------------------------------------------


def test_a_run_without_a_name_is_new_each_time(tmp_path: Path) -> None:
    first = begin(config(), tmp_path, "auto", ("lion", "ema"))
    assert re.fullmatch(r"mine-lion-ema-[0-9a-f]{8}-\d{8}-\d{6}", first.dir.name)
    assert not first.continues
    make_run(first.dir)
    again = begin(config(), tmp_path, "auto", ("lion", "ema"))
    assert again.dir != first.dir
    assert not again.continues


def test_the_id_knows_the_configuration(tmp_path: Path) -> None:
    def digest(**values: Any) -> str:
        return begin(Config(run=RunSection(**values), source="x"), tmp_path, "auto").dir.name.split("-")[1]

    assert digest() == digest()
    assert digest() != digest(seed=1)


def test_a_named_run_continues_itself(tmp_path: Path) -> None:
    assert begin(config("a"), tmp_path, "auto") == Start(tmp_path / "a", new=True)
    make_run(tmp_path / "a")
    assert begin(config("a"), tmp_path, "auto") == Start(tmp_path / "a", continues=True)


def test_never_starts_over_in_a_new_folder(tmp_path: Path) -> None:
    assert begin(config("a"), tmp_path, "never") == Start(tmp_path / "a", new=True)
    for number in ("", "-2", "-3"):
        assert begin(config("a"), tmp_path, "never").dir == tmp_path / f"a{number}"
        make_run(tmp_path / f"a{number}")
    assert not begin(config("a"), tmp_path, "never").continues


def test_the_path_of_a_run_continues_it_in_place(tmp_path: Path) -> None:
    run = make_run(tmp_path / "elsewhere" / "old")
    for name in ("", "old"):
        assert begin(config(name), tmp_path, str(run)) == Start(run, continues=True)
    with pytest.raises(ConfigError, match="it can't be named 'new' too"):
        begin(config("new"), tmp_path, str(run))


def test_the_path_of_a_checkpoint_starts_a_new_run_there(tmp_path: Path) -> None:
    path = make_run(tmp_path / "old") / "checkpoints" / "step-00000004"
    path.mkdir()
    (path / "state.json").touch()
    assert begin(config("new"), tmp_path, str(path)) == Start(tmp_path / "new", checkpoint=path, new=True)
    assert begin(config("old"), tmp_path, str(path)) == Start(tmp_path / "old-2", checkpoint=path, new=True)
    assert is_checkpoint(path)
    assert not is_run(path)


@pytest.mark.parametrize("content", [["log"], ["log", "checkpoints", "config.toml"], [".config.toml.partial"], []])
def test_a_folder_whose_process_was_killed_before_it_was_a_run_is_taken(tmp_path: Path, content: list[str]) -> None:
    (tmp_path / "a").mkdir()
    for name in content:
        (tmp_path / "a" / name).touch() if "." in name else (tmp_path / "a" / name).mkdir()
    assert begin(config("a"), tmp_path, "auto") == Start(tmp_path / "a", continues=False)


@pytest.mark.parametrize("content", ["photo.jpg", ".git", "metrics.jsonl"])
def test_somebody_elses_folder_is_left_alone(tmp_path: Path, content: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / content).touch()
    with pytest.raises(ConfigError, match="exists and is not a run; choose another --name or --run-dir"):
        begin(config("a"), tmp_path, "auto")


@pytest.mark.parametrize("resume", ["", "Auto", "nowhere"])
def test_what_resume_takes(tmp_path: Path, resume: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"--resume {resume}: expected auto, never, or the path"):
        begin(config(), tmp_path, resume)


# -- what is in it --------------------------------------------------------------------------------


def test_a_run_folder_holds_all_that_is_needed_to_repeat_it(tmp_path: Path) -> None:
    class Draws(Plugin):
        """Writes an artifact."""

        @hookimpl
        def on_finish(self, finished: Any) -> None:
            self.job.run.artifact("deep/picture.txt").write_text("x", encoding="utf-8")

        @hookimpl
        def on_start(self, job: Any) -> None:
            self.job = job

    first = toys.run(tmp_path, toys.Noise, Draws, name="first")
    names = {path.name for path in first.run.iterdir()}
    assert names == {
        *("config.toml", "plugins.json", "environment.json", "composition.json", "outcome.json"),
        *("metrics.jsonl", "events.jsonl", "log", "artifacts", "checkpoints"),
    }
    assert (first.run / "artifacts" / "deep" / "picture.txt").exists()
    assert (first.run / "log" / "rank-0.log").exists()
    plugins = json.loads((first.run / "plugins.json").read_text(encoding="utf-8"))
    assert [entry["name"] for entry in plugins] == sorted(first.job.config.enabled())
    for entry in plugins:
        assert entry.keys() == {"name", "distribution", "version", "object", "hash"}
    assert all(entry["hash"] for entry in plugins if entry["distribution"] == "forge-train")
    environment = json.loads((first.run / "environment.json").read_text(encoding="utf-8"))
    assert environment.keys() >= {"forge", "python", "torch", "git", "devices", "launcher"}
    with installed([toys.ToyModel, toys.ToyData, toys.Noise, Draws]):
        setup = resolve(Request(config=str(first.run / "config.toml")))
        from forge_train.loop.engine import train

        again = train(setup, run_dir=tmp_path)
    assert again.run != first.run
    assert again.loss == first.finished.loss
    assert (again.run / "config.toml").read_bytes() == (first.run / "config.toml").read_bytes()
    for file in ("config.toml", "plugins.json"):
        inside = first.run / "checkpoints" / "step-00000004" / file
        assert inside.read_bytes() == (first.run / file).read_bytes()


def test_how_it_ended(tmp_path: Path) -> None:
    run = toys.run(tmp_path, name="a", steps=4, stop_at=2)
    assert Run(run.run).outcome() == {"outcome": "interrupted", "step": 2, "loss": run.losses[-1], "code": 75}
    run = toys.run(tmp_path, name="a", steps=4)
    assert Run(run.run).outcome() == {"outcome": "done", "step": 4, "loss": run.losses[-1], "code": 0}
    assert Run(tmp_path / "absent").outcome() == {}


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x"
    write_whole(file, "old")
    monkeypatch.setattr("os.fsync", lambda handle: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_whole(file, "new")
    assert file.read_text(encoding="utf-8") == "old"
