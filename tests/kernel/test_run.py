"""What a run is called, what it continues, and what its folder holds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import toys
from forge_train import ConfigError, Plugin, hookimpl
from forge_train.base.files import write_whole
from forge_train.config import Config
from forge_train.config.sections import RunSection
from forge_train.run.run import Run, is_checkpoint, is_run
from forge_train.run.start import Start
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.launching.claim import begin
from forge_train_tools.launching.starting_over import changed_values
from forge_train_tools.testing import installed

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
        def on_end(self, finished: Any) -> None:
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
        from forge_train.engine import train

        again = train(setup, run_dir=tmp_path)
    assert again.run != first.run
    assert again.loss == first.finished.loss
    assert (again.run / "config.toml").read_bytes() == (first.run / "config.toml").read_bytes()
    for file in ("config.toml", "plugins.json"):
        inside = first.run / "checkpoints" / "step-00000004" / file
        assert inside.read_bytes() == (first.run / file).read_bytes()


def test_how_it_ended(tmp_path: Path) -> None:
    run = toys.run(tmp_path, name="a", steps=4, stop_at=2)
    assert Run(run.run).outcome() == {
        "outcome": "interrupted",
        "step": 2,
        "loss": run.losses[-1],
        "code": 75,
        "error": None,
    }
    run = toys.run(tmp_path, name="a", steps=4)
    assert Run(run.run).outcome() == {"outcome": "done", "step": 4, "loss": run.losses[-1], "code": 0, "error": None}
    assert Run(tmp_path / "absent").outcome() == {}


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x"
    write_whole(file, "old")
    monkeypatch.setattr("os.fsync", lambda handle: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_whole(file, "new")
    assert file.read_text(encoding="utf-8") == "old"


# -- names and folders that can't be ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("a" * 300, "run.name: expected at most 200 bytes, found 300: 'aaaa"),
        ("ü" * 101, "run.name: expected at most 200 bytes, found 202"),
        ('"x"', 'run.name: expected a name without quotation marks around it, found "x"; write --set run.name=x.'),
        ("a/b", "expected the name of a folder, found the path 'a/b'"),
        ("..", "expected the name of a folder"),
        (".a", "expected a name that does not begin with a dot, found '.a'"),
        ("  ", "expected a name"),
        ("a\tb", r"expected a name of printable characters, and no spaces at either end, found 'a\tb'"),
        ("a\x00b", "expected a name of printable characters"),
        ("\udcff", r"expected a name of printable characters, and no spaces at either end, found '\udcff'"),
    ],
)
def test_a_name_that_no_folder_can_have(tmp_path: Path, name: str, says: str) -> None:
    from forge_cli import forge, one_message

    ended = forge("train", toys.write_config(tmp_path), "--run-dir", tmp_path / "runs", "--name", name)
    assert says in one_message(ended, 2)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", [" a", "a\\u0000b", "a\\nb"])
def test_a_name_in_a_file_is_taken_as_it_stands(tmp_path: Path, name: str) -> None:
    from forge_cli import forge, one_message

    file = toys.write_config(tmp_path)
    file.write_text(file.read_text(encoding="utf-8").replace("[run]", f'[run]\nname = "{name}"'), encoding="utf-8")
    message = one_message(forge("train", file, "--run-dir", tmp_path / "runs"), 2)
    assert re.search(r"toy\.toml:\d+: run\.name: expected printable characters, and no spaces at either end", message)


def test_the_longest_name_and_the_longest_source(tmp_path: Path) -> None:
    assert toys.run(tmp_path, name="a" * 200).run.name == "a" * 200
    assert toys.run(tmp_path, name="a" * 200, resume="never").run.name == "a" * 200 + "-2"
    long = begin(Config(source="ü" * 200), tmp_path, "auto", ("b" * 100,)).dir
    long.mkdir()
    assert re.fullmatch(r"ü{100}-[0-9a-f]{8}-\d{8}-\d{6}", long.name)


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder of runs that nobody can write to, with one run in it."""
    import os
    import subprocess

    folder = tmp_path / "runs"
    toys.run(folder, name="old", stop_at=2)
    if os.geteuid():
        (folder / "old").chmod(0o555)
        folder.chmod(0o555)
        yield folder
        folder.chmod(0o755)
        return
    mount = ["mount", "--bind", folder, folder], ["mount", "-o", "remount,ro,bind", folder]
    if any(subprocess.run(command, capture_output=True, check=False).returncode for command in mount):
        pytest.skip("nothing can be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("name", ["old", "new"])
@pytest.mark.parametrize("more", [(), ("--nproc", "2")])
def test_a_folder_that_can_t_be_written_is_told_before_the_first_step(
    tmp_path: Path, read_only: Path, name: str, more: tuple[str, ...]
) -> None:
    from forge_cli import forge, one_message

    file = toys.write_config(tmp_path)
    message = one_message(forge("train", file, "--run-dir", read_only, "--name", name, "--quiet", *more), 2)
    assert re.fullmatch(rf"{read_only}/{name}: can't write the run folder: (Read-only|Permission).*\.", message)


@pytest.mark.parametrize("more", [(), ("--nproc", "2")])
def test_places_where_no_run_can_be(tmp_path: Path, more: tuple[str, ...]) -> None:
    from forge_cli import forge, one_message

    file, deep = toys.write_config(tmp_path), "/".join(["a" * 250] * 17)
    for folder, name, reason in (
        (file, "x", "can't write the run folder: Not a directory."),
        (tmp_path / deep, "x", "can't write the run folder: File name too long."),
        (tmp_path, file.name, "exists and is not a run"),
        (file, "", "can't write the run folder: Not a directory."),
    ):
        named = ("--name", name) if name else ()
        assert reason in one_message(forge("train", file, "--run-dir", folder, "--quiet", *named, *more), 2)
    one_message(forge("train", file, "--resume", deep, "--quiet", *more), 2)


# -- starting over --------------------------------------------------------------------------------


class Stops(Plugin):
    """Fails in the third step, before anything was saved; leaves an artifact."""

    @hookimpl
    def on_start(self, job: Any) -> None:
        job.run.artifact("note.txt").write_text("first", encoding="utf-8")

    @hookimpl
    def on_step(self, step: Any) -> None:
        if step.step == 3:
            raise LookupError("enough")


def test_a_run_without_a_checkpoint_says_that_it_starts_over_and_keeps_the_old_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "a"
    for _ in range(2):
        with pytest.raises(LookupError):
            toys.run(tmp_path, Stops, name="a")
    old = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    caplog.clear()
    done = toys.run(tmp_path, name="a", steps=5)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(
        f"{run} has no whole checkpoint, so the run starts over. What was there is kept in attempt-2."
    )
    assert "\n  train.steps: 4 then, 5 now" in said
    assert "\n  plugins: " in said
    assert said in (run / "log" / "rank-0.log").read_text(encoding="utf-8")
    assert [line["step"] for line in done.metrics] == [1, 2, 3, 4, 5]
    assert [event["event"] for event in done.events].count("run_started") == 1
    for number in (1, 2):
        kept = run / f"attempt-{number}"
        assert is_run(kept)
        assert len((kept / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 2
        assert (kept / "artifacts" / "note.txt").exists()
        assert json.loads((kept / "outcome.json").read_text(encoding="utf-8"))["outcome"] == "failed"
    assert {path.name: path.read_bytes() for path in (run / "attempt-2").iterdir() if path.is_file()} == old
    caplog.clear()
    assert toys.run(tmp_path, name="a", steps=6).finished.step == 6
    assert "starts over" not in caplog.text
    assert not (run / "attempt-3").exists()


def test_damaged_checkpoints_are_kept_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = toys.run(tmp_path, name="a").run
    (run / "checkpoints" / "step-00000004" / "state.json").unlink()
    (run / "checkpoints" / ".step-00000008.partial").mkdir()
    assert toys.run(tmp_path, name="a", steps=5).finished.step == 5
    assert not [*run.rglob(".step-*")], "what a killed save left is no use to anybody"
    assert "The values are not the same:\n  train.steps: 4 then, 5 now" in caplog.text
    assert (run / "attempt-1" / "checkpoints" / "step-00000004" / "manifest.json").exists()


@pytest.mark.parametrize("moves", range(1, 8))
def test_killed_while_it_puts_files_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: int) -> None:
    with pytest.raises(LookupError):
        toys.run(tmp_path, Stops, name="a")
    lines = (tmp_path / "a" / "metrics.jsonl").read_bytes()
    real, done = Path.rename, []

    def rename(path: Path, target: Path) -> Path:
        done.append(path)
        if len(done) == moves:
            raise KeyboardInterrupt
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        toys.run(tmp_path, name="a")
    monkeypatch.undo()
    again = toys.run(tmp_path, name="a")
    assert [line["step"] for line in again.metrics] == [1, 2, 3, 4]
    assert lines in [file.read_bytes() for file in (tmp_path / "a").glob("attempt-*/metrics.jsonl")]


def test_a_configuration_that_an_editor_of_windows_has_saved_is_compared(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[train]\nsteps = 4\n", encoding="utf-8-sig")
    changed = changed_values(tmp_path / "config.toml", "[train]\nsteps = 5\n")
    assert changed == ["train.steps: 4 then, 5 now"]
