"""A full disk on one process: wherever the writing stops, one message; what has no room never hides what went wrong."""

from __future__ import annotations

import errno
import json
import logging
import pickle
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import toys
from forge_train.base.files import DiskError, refused
from forge_train.checkpoint.checkpoint import check, found
from forge_train.engine import train
from forge_train_tools.launching import launch
from forge_train_tools.launching.launch import WorkerCommand, WorkerResult, leave, left
from forge_train_tools.launching.log_file import LogFile
from full_disk import full_for

pytestmark = [pytest.mark.unit]


@pytest.mark.parametrize(
    ("ending", "what"),
    [
        ("metrics.jsonl", r"run/metrics\.jsonl: can't be written"),
        ("events.jsonl", r"run/events\.jsonl: can't be written"),
        ("composition.json", r"run/composition\.json: can't be written"),
        ("outcome.json", r"run/outcome\.json: can't be written"),
        ("environment.json", r"run: can't write the run folder"),
    ],
)
def test_a_run_s_own_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], ending: str, what: str) -> None:
    with full_for(f".{ending}", ending, below="run"), pytest.raises(DiskError) as caught:
        toys.run(tmp_path, name="run", steps=2)
    message = str(caught.value)
    assert re.fullmatch(rf"{tmp_path}/{what}: No space left on device \(the disk at .* left\)\. Make room .*", message)
    assert caught.value.code == 1
    assert not [path for path in tmp_path.rglob("*") if "partial" in path.name]
    assert capsys.readouterr().err == ""
    if ending in ("metrics.jsonl", "composition.json", "events.jsonl"):  # for which there is room
        assert json.loads((tmp_path / "run" / "outcome.json").read_text())["outcome"] == "failed"
    resumed = toys.run(tmp_path, name="run", steps=2)
    assert resumed.finished.outcome == "done"


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [100, 400, 1000, 2500, 6000, 20_000])
def test_wherever_files_stop_growing(tmp_path: Path, size: int) -> None:
    """The system's own refusal, at a size that hits one file after the other."""
    config = {"checkpoint.every": 1, "checkpoint.keep": 9}
    setup = toys.setup(folder=tmp_path, config={**config, "run.name": "run", "train.steps": 4})
    told = ""
    with files_of_at_most(size):
        try:
            train(setup, run_dir=tmp_path)
        except DiskError as error:
            told = str(error)
    run = tmp_path / "run"
    if size < 20_000:
        assert "File too large" in told
        assert str(run) in told
    assert not [path for path in run.rglob("*") if "partial" in path.name]
    assert all(check(saved.path, contents=True) == "" for saved in found(run / "checkpoints"))
    assert toys.run(tmp_path, name="run", steps=5, config=config).finished.step == 5


def test_a_log_without_room_says_nothing_and_closes(capfd: pytest.CaptureFixture[str]) -> None:
    handler = LogFile("/dev/full", encoding="utf-8")
    handler.emit(logging.LogRecord("x", logging.ERROR, "file", 1, "a line", None, None))
    handler.close()
    assert capfd.readouterr().err == ""
    handler = LogFile("/dev/null", encoding="utf-8")
    handler.handle(logging.LogRecord("x", logging.ERROR, "file", 1, "%d", ("no number",), None))
    handler.close()
    assert "no number" in capfd.readouterr().err, "a mistake in a message is told as ever"


def test_a_rank_can_say_how_it_ended_on_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the room that was reserved for that."""
    task = WorkerCommand("module:function", {}, folder=tmp_path / "launch", logs=tmp_path)
    task.write(2)
    real = launch.write_json

    def used() -> int:
        return sum(one.stat().st_size for one in task.folder.iterdir())

    full = used()

    def write(file: Path, value: object) -> None:
        if used() >= full:
            raise OSError(28, "No space left on device")
        real(file, value)

    monkeypatch.setattr(launch, "write_json", write)
    leave(task.folder, 0, WorkerResult(1, 1, message="the disk is full"))
    outcome = left(task.folder, 0, 1)
    assert outcome is not None
    assert outcome.message == "the disk is full"


@pytest.mark.parametrize(("number", "full"), [("ENOSPC", True), ("EDQUOT", True), ("EFBIG", True), ("EROFS", False)])
def test_a_launcher_knows_that_another_attempt_finds_no_room(tmp_path: Path, number: str, full: bool) -> None:
    """Also of a rank that has the error from another one."""
    error = refused(tmp_path, OSError(getattr(errno, number), "no"))
    assert pickle.loads(pickle.dumps(error)).full is full
    task = WorkerCommand("module:function", {}, folder=tmp_path / "launch", logs=tmp_path)
    task.write(1)
    leave(task.folder, 0, WorkerResult(0, 1, message=str(error), disk_full=error.full))
    outcome = left(task.folder, 0, 0)
    assert outcome is not None
    assert outcome.disk_full is full
