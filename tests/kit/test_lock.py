"""One run belongs to one job: a second process is refused, a dead one's lock is taken over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import toys
from forge_cli import forge, one_message, start
from forge_train import ConfigError, ForgeError, Plugin, hookimpl
from forge_train.run.run import Run
from forge_train.run.start import Start
from forge_train_kit import lock
from forge_train_kit.lock import Owner, take

pytestmark = [pytest.mark.unit]


def locks(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(".lock.*"))


def leave(folder: Path, owner: Owner) -> Path:
    """The lock of another process."""
    folder.mkdir(exist_ok=True)
    file = folder / ".lock.3"
    file.write_text(json.dumps(asdict(owner)), encoding="utf-8")
    return file


@contextmanager
def process(code: str = "import time; time.sleep(60)") -> Iterator[subprocess.Popen[bytes]]:
    running = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield running
    finally:
        running.kill()
        running.wait()


def owner_of(pid: int) -> Owner:
    return replace(Owner.here(), pid=pid, started=lock._started(pid) or "")


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs of life as often as a test has time for."""
    monkeypatch.setattr(lock, "BEAT", 0.1)
    monkeypatch.setattr(lock, "SILENCE", 0.6)


def test_the_first_has_it_until_it_lets_go(tmp_path: Path) -> None:
    first = take(tmp_path)
    with pytest.raises(ConfigError, match=rf"process {os.getpid()} on \S+ is training this run\. Wait until"):
        take(tmp_path)
    first.release()
    assert locks(tmp_path) == []
    again = take(tmp_path)
    assert again.taken_from == ""
    again.release()


def test_a_dead_process_loses_it_at_once(tmp_path: Path) -> None:
    with process() as other:
        leave(tmp_path, owner_of(other.pid))
        with pytest.raises(ConfigError, match=f"process {other.pid} on"):
            take(tmp_path)
        other.send_signal(signal.SIGKILL)
        for _ in range(200):  # not waited for: a zombie is dead too
            if "Z" in Path(f"/proc/{other.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2]:
                break
            time.sleep(0.01)
        taken = take(tmp_path)
        assert taken.taken_from.startswith(f"process {other.pid} on ")
        assert locks(tmp_path) == [".lock.4"]
        taken.release()


def test_an_id_that_was_given_to_another_process_is_not_mistaken(tmp_path: Path) -> None:
    leave(tmp_path, replace(Owner.here(), started="1"))
    taken = take(tmp_path)
    assert taken.taken_from
    taken.release()


@pytest.mark.usefixtures("soon")
def test_another_machine_s_lock_holds_while_it_gives_signs_of_life(tmp_path: Path) -> None:
    file = leave(tmp_path, Owner(1, "far", "far boot", "1"))
    said: list[str] = []
    ended = threading.Event()

    def live() -> None:
        while not ended.wait(0.1):
            os.utime(file)

    threading.Thread(target=live).start()
    try:
        with pytest.raises(ConfigError, match="process 1 on far is training this run"):
            take(tmp_path, said.append)
    finally:
        ended.set()
    assert "is locked by process 1 on far. Waiting up to" in said[0]
    taken = take(tmp_path, said.append)
    assert taken.taken_from == "process 1 on far"
    taken.release()


@pytest.mark.usefixtures("soon")
def test_a_lock_without_a_name_is_judged_by_its_signs_of_life(tmp_path: Path) -> None:
    (tmp_path / ".lock.1").touch()
    taken = take(tmp_path)
    assert locks(tmp_path) == [".lock.2"]
    taken.release()


@pytest.mark.usefixtures("soon")
def test_an_owner_gives_signs_of_life(tmp_path: Path) -> None:
    held = take(tmp_path)
    os.utime(held.file, (1, 1))
    deadline = time.monotonic() + 20
    while held.file.stat().st_mtime < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert held.file.stat().st_mtime > 2
    held.release()


RACE = """
import os, pathlib, sys, time
from forge_train import ConfigError
from forge_train_kit.lock import take

def outcome(folder):
    try:
        return b"wins", take(folder)
    except ConfigError:
        return b"lost", None

for _ in range(6):
    go, tell, wait = time.time() + 0.05, os.pipe(), os.pipe()
    for _ in range(8):
        if not os.fork():
            os.close(wait[1])
            while time.time() < go: pass
            said, lock = outcome(pathlib.Path(sys.argv[1]))
            os.write(tell[1], said)
            os.read(wait[0], 1)  # until everybody has tried
            os._exit(0)  # without letting go: the next round finds a dead owner
    said = [os.read(tell[0], 4).decode() for _ in range(8)]
    os.close(wait[1])
    print(said.count("wins"), said.count("lost"))
    for _ in range(8): os.wait()
"""


def test_of_several_at_the_same_instant_exactly_one_wins(tmp_path: Path) -> None:
    """Eight processes, six times; from the second round on they find the lock of one that is dead."""
    done = subprocess.run([sys.executable, "-c", RACE, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["1 7"] * 6


@pytest.mark.usefixtures("soon")
def test_a_lock_that_is_no_text_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / ".lock.1").write_bytes(b"\xff\xfe")
    take(tmp_path).release()


# -- runs -----------------------------------------------------------------------------------------


def test_a_second_run_in_the_folder_is_refused(tmp_path: Path) -> None:
    refused: list[str] = []

    class Starts(Plugin):
        """Starts the same run while it runs."""

        @hookimpl
        def on_step(self, step: Any) -> None:
            if step.step == 2:
                with pytest.raises(ConfigError) as caught:
                    toys.run(tmp_path, name="a")
                refused.append(str(caught.value))

    run = toys.run(tmp_path, Starts, name="a")
    assert [line["step"] for line in run.metrics] == [1, 2, 3, 4]
    assert f"process {os.getpid()} on" in refused[0]
    assert locks(run.run) == []


@pytest.mark.parametrize("fail", [ValueError, ConfigError])
def test_a_run_that_fails_lets_go(tmp_path: Path, fail: type[Exception]) -> None:
    class Fails(Plugin):
        @hookimpl
        def on_start(self, job: Any) -> None:
            raise fail("x")

        @hookimpl
        def on_step(self, step: Any) -> None: ...

    with pytest.raises(fail):
        toys.run(tmp_path, Fails, name="a")
    assert locks(tmp_path / "a") == []
    assert (tmp_path / "a").exists() == (fail is ValueError)


def test_two_runs_without_a_name_get_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both began in the same second, and both looked before either made its folder."""
    from forge_train_tools.launching import claim as starting

    monkeypatch.setattr("time.strftime", lambda *arguments: "now")
    first = toys.run(tmp_path).run
    real, calls = starting.begin, []

    def too_early(*arguments: Any) -> Any:
        calls.append(arguments)
        return Start(first, new=True) if len(calls) == 1 else real(*arguments)

    monkeypatch.setattr(starting, "begin", too_early)
    assert toys.run(tmp_path).run == first.with_name(f"{first.name}-2")
    assert len(calls) == 2


def test_a_job_that_lost_its_lock_writes_no_more(tmp_path: Path) -> None:
    """It was stopped for so long that a job on another machine took it for dead."""

    class Loses(Plugin):
        """Another machine takes over during the third step."""

        @hookimpl
        def on_start(self, job: Any) -> None:
            self.run: Run = job.run

        @hookimpl
        def on_step(self, step: Any) -> None:
            if step.step == 3:
                for file in self.run.dir.glob(".lock.*"):
                    file.unlink()
                leave(self.run.dir, Owner(1, "far", "far boot", "1"))

    with pytest.raises(ForgeError, match="process 1 on far took this run over"):
        toys.run(tmp_path, Loses, name="a", config={"checkpoint.every": 2})
    run = tmp_path / "a"
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    assert not (run / "outcome.json").exists()
    assert locks(run) == [".lock.3"], "the other's"


@pytest.mark.slow
@pytest.mark.e2e
def test_two_commands_and_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two equal commands is refused in one message; after `kill -9` it goes on, and says so."""
    monkeypatch.chdir(tmp_path)
    values = {"train.steps": 100_000, "checkpoint.every": 5}
    arguments = ["train", toys.write_config(tmp_path, **values), "--name", "a", "--quiet"]
    first = start(*arguments, preloaded=True, cwd=tmp_path)
    try:
        run = tmp_path / "runs" / "a"
        deadline = time.monotonic() + 120
        while not list((run / "checkpoints").glob("step-*")):
            assert first.poll() is None, first.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for more in ([], ["--nproc", "2"], ["--resume", run]):
            message = one_message(forge(*arguments, *more), 2)
            assert f"runs/a: process {first.pid} on" in message.replace(f"{tmp_path}/", "")
    finally:
        first.kill()
        first.communicate()
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))
    again = forge(*arguments, "-s", f"train.steps={len(steps) + 2}")
    assert again.code == 0, again.err
    assert f"took the lock over from process {first.pid} on" in again.err
    assert f"took the lock over from process {first.pid} on" in (run / "log" / "rank-0.log").read_text()
    assert locks(run) == []
