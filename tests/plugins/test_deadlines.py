"""Limits of time: `train.max_hours`, and the end of a Slurm job."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import toys
from forge_train.checkpoint.checkpoint import check, found
from forge_train_plugins.resilience._signals import end_of_job, seconds_left
from forge_train_plugins.resilience.signals import Signals


@pytest.mark.unit
def test_hours_of_training(tmp_path: Path) -> None:
    stopped = toys.run(tmp_path, name="a", steps=6, config={"train.max_hours": 1e-9})
    assert (stopped.finished.outcome, stopped.finished.code, stopped.finished.step) == ("interrupted", 75, 1)
    assert stopped.finished.reason == "train.max_hours = 1e-09"
    assert [check(saved.path, contents=True) for saved in found(stopped.run / "checkpoints")] == [""]
    again = toys.run(tmp_path, name="a", steps=6)
    assert again.numbers == toys.run(tmp_path, name="b", steps=6, config={"train.max_hours": 1.0}).numbers


@pytest.mark.unit
def test_the_end_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert end_of_job({}) is None
    assert end_of_job({"SLURM_JOB_END_TIME": "1700000000", "SLURM_JOB_ID": "7"}) == 1.7e9
    assert [seconds_left(text) for text in ("1-02:03:04\n", "02:03:04", "3:04", "UNLIMITED", "INVALID", "")] == [
        *(93784.0, 7384.0, 184.0),
        *(None, None, None),
    ]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert end_of_job({"SLURM_JOB_ID": "7"}) is None, "there is no squeue"
    script(tmp_path / "squeue", '[ "$*" = "-h -j 7 -o %L" ] && echo 1:40')
    assert end_of_job({"SLURM_JOB_ID": "7"}) == pytest.approx(time.time() + 100, abs=30)


@pytest.mark.unit
@pytest.mark.parametrize(("left", "step", "save", "stops"), [(200, 1, 1, False), (125, 4, 2, True), (125, 2, 2, False)])
def test_what_is_left_must_do_for_a_step_and_a_save(
    monkeypatch: pytest.MonkeyPatch, left: float, step: float, save: float, stops: bool
) -> None:
    plugin: Any = Signals(Signals.Config())
    asked: list[str] = []
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    plugin._end, plugin._longest = 1000.0 + left, {"step": step, "save": save}
    plugin._job = type("Job", (), {"control": type("Control", (), {"stop": staticmethod(asked.append)})})
    plugin.on_step(None)
    assert asked == ([f"the Slurm job ends in {left} s"] if stops else [])


@pytest.mark.unit
def test_a_run_saves_before_its_job_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 60))
    stopped = toys.run(tmp_path, "signals", name="a", steps=6)
    assert (stopped.finished.code, stopped.finished.step) == (75, 1)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 10**6))
    assert toys.run(tmp_path, "signals", name="a", steps=6).finished.code == 0


def script(file: Path, text: str) -> None:
    file.write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
    file.chmod(0o755)
