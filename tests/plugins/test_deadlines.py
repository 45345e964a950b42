"""Limits of time: `train.max_hours`, the end of a Slurm job, and the script that queues the job again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import toys
from forge_cli import environment
from forge_train.storage.checkpoint import check, found
from forge_train.testing import assert_conforms
from forge_train_plugins.resilience._signals import end_of_job, seconds_left
from forge_train_plugins.resilience.signals import Signals

ROOT = Path(__file__).parents[2]


@pytest.mark.unit
def test_it_conforms() -> None:
    assert_conforms("signals", strict=True)


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


@pytest.mark.e2e
def test_the_script_queues_the_job_again_until_it_is_done(tmp_path: Path) -> None:
    """The script of the page, with stand-ins for Slurm: one start is interrupted, the next one goes on."""
    page = (ROOT / "docs/how-to/slurm.md").read_text(encoding="utf-8")
    text = page.partition("```bash title=")[2].partition("\n")[2].partition("```")[0]
    text = text.replace("/shared/runs", str(tmp_path / "runs"))
    (tmp_path / "train.sbatch").write_text(text, encoding="utf-8")
    toys.write_config(tmp_path, **{"train.steps": 3}).rename(tmp_path / "mine.toml")
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    script(bin_ / "srun", 'shift; exec "$@"')
    script(bin_ / "scontrol", f'echo "$*" >> {tmp_path / "asked"}')
    script(bin_ / "forge", f'shift; exec {sys.executable} -m forge_train_cli train "$@" --quiet')
    env = environment() | {"SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_NAME": "mine", "SLURM_JOB_ID": "42"}
    env["PATH"] = f"{bin_}{os.pathsep}{env['PATH']}"

    def job(**more: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", "train.sbatch"]
        return subprocess.run(command, cwd=tmp_path, env={**env, **more}, capture_output=True, text=True, check=False)

    first = job(FORGE_SET="train.max_hours=1e-9")
    assert first.returncode == 75, first.stderr
    assert (tmp_path / "asked").read_text() == "requeue 42\n"
    second = job()
    assert second.returncode == 0, second.stderr
    assert (tmp_path / "asked").read_text() == "requeue 42\n", "a job that is done is not queued again"
    assert [saved.step for saved in found(tmp_path / "runs" / "mine" / "checkpoints")] == [3, 1]


def script(file: Path, text: str) -> None:
    file.write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
    file.chmod(0o755)
