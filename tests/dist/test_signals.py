"""Signals while a checkpoint is being written: it is whole or invisible, and the exit code says which."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

import pytest

import toys
from forge_cli import environment, forge, forge_process
from forge_train.checkpoint.checkpoint import check, found
from forge_train.run.records import TIMINGS, read
from signalling import Signalling

pytestmark = [pytest.mark.timeout(400)]
DIST = Path(__file__).parent
STEPS = 6


@pytest.mark.unit
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_one_signal_lets_it_finish(tmp_path: Path, number: int) -> None:
    config = {"checkpoint.every": 2, "signalling": {"numbers": [int(number)]}}
    stopped = toys.run(tmp_path, Signalling, name="a", steps=STEPS, config=config)
    assert (stopped.finished.outcome, stopped.finished.code, stopped.finished.step) == ("interrupted", 75, 3)
    assert [(saved.step, check(saved.path, contents=True)) for saved in found(stopped.run / "checkpoints")] == [
        (3, ""),
        (2, ""),
    ]
    again = toys.run(tmp_path, Signalling, name="a", steps=STEPS, config={"checkpoint.every": 2})
    assert again.numbers == toys.run(tmp_path, Signalling, name="b", steps=STEPS).numbers


@pytest.mark.unit
def test_one_signal_during_the_last_save_changes_nothing(tmp_path: Path) -> None:
    config = {"signalling": {"numbers": [int(signal.SIGTERM)], "at": STEPS}}
    done = toys.run(tmp_path, Signalling, steps=STEPS, config=config)
    assert (done.finished.outcome, done.finished.code) == ("done", 0)


@pytest.mark.unit
def test_a_signal_counts_also_where_nothing_can_be_told(tmp_path: Path, logger: logging.Logger) -> None:
    """The terminal of a session that was cut off: every write to it fails."""

    class Gone(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError(5, "Input/output error")

    logger.addHandler(Gone())
    config = {"signalling": {"numbers": [int(signal.SIGTERM)]}, "checkpoint.every": 2}
    assert toys.run(tmp_path, Signalling, steps=STEPS, config=config).finished.code == 75


@pytest.mark.e2e
@pytest.mark.dist
@pytest.mark.parametrize(
    ("nproc", "numbers", "code"),
    [(1, (15, 15), 143), pytest.param(2, (10,), 75, marks=pytest.mark.extended), (2, (2, 15), 143)],
    ids=["alone", "once", "twice"],
)
def test_signals_in_processes_of_their_own(tmp_path: Path, nproc: int, numbers: tuple[int, ...], code: int) -> None:
    more = {"checkpoint.every": 2, "signalling.at": 4, "train.steps": STEPS}
    file = toys.write_config(tmp_path, "signalling:Signalling", "layouts:Replicas", **more)
    env = environment()
    env["PYTHONPATH"] += f"{os.pathsep}{DIST}"
    command = ["train", file, "--name", "a", "--quiet", "--without", "fsdp2", "--run-dir", tmp_path]
    several = ["--nproc", nproc] if nproc > 1 else []
    ended = forge_process(
        *command, *several, "-s", f"signalling.numbers={list(numbers)}", preloaded=True, env=env, timeout=300
    )
    assert (ended.code if ended.code >= 0 else 128 - ended.code) == code, ended.err
    assert "Traceback" not in ended.err
    saved = found(tmp_path / "a" / "checkpoints")
    assert not any(check(one.path, contents=True) for one in saved)
    assert [one.step for one in saved] == ([2] if len(numbers) == 2 else [6, 4])
    ended = forge(*command)
    assert ended.code == 0, ended.err
    alone = toys.run(tmp_path, name="alone", steps=STEPS, config={"checkpoint.every": 2})
    lines = [{k: v for k, v in line.items() if k not in TIMINGS} for line in read(tmp_path / "a" / "metrics.jsonl")]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line, expected in zip(lines, alone.numbers, strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
