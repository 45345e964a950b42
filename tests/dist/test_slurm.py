"""The script of `forge launch slurm`, run by bash: two ranks are preempted, queued again, and end as if undisturbed.

In CI, tests/cli/test_cli_launch.py runs the script, and `test_launch.py` starts ranks as Slurm does.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

import toys
from forge_cli import forge, forge_process
from forge_train.checkpoint.checkpoint import check, found
from forge_train.run import records

pytestmark = [pytest.mark.dist, pytest.mark.e2e, pytest.mark.extended]
TESTS = Path(__file__).parent.parent
STEPS = 8
SRUN = """
while [[ "$1" == --* ]]; do shift; done
export SLURM_NTASKS=2 SLURM_STEP_ID=0 SLURM_JOB_NODELIST=localhost SLURM_TASKS_PER_NODE=2
for rank in 0 1; do SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" > "rank-$rank.txt" 2>&1 & tasks+=($!); done
if [ -n "$PREEMPT_AT" ]; then
    until grep -q "\\"step\\": $PREEMPT_AT," runs/mine/metrics.jsonl 2>/dev/null; do
        kill -0 "${tasks[0]}" || break
        sleep 0.05
    done
    kill -USR1 "${tasks[@]}"
fi
code=0
for task in "${tasks[@]}"; do wait "$task"; ended=$?; [ $ended -gt $code ] && code=$ended; done
exit $code
"""
"""Two tasks, to which Slurm sends the signal of `--signal` once a step was logged; ends as the worse of them."""


def test_preempted_and_queued_again(tmp_path: Path) -> None:
    values = {"train.steps": STEPS, "slow.seconds": 0.1, "log.every": 1}
    file = toys.write_config(tmp_path, "layouts:Replicas", "layouts:Slow", **values).rename(tmp_path / "mine.toml")
    env = {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS / "dist")]), "OMP_NUM_THREADS": "1"}
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    stand_ins = {
        "srun": SRUN,
        "scontrol": 'echo "$*" >> asked',
        "squeue": 'case "$*" in *%T) echo RUNNING;; *%L) echo 2:00:00;; esac',
        "sbatch": "echo 42",
    }
    for name, text in stand_ins.items():
        (bin_ / name).write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
        (bin_ / name).chmod(0o755)
    env["PATH"] = f"{bin_}{os.pathsep}{os.environ['PATH']}"
    asked = ("--nproc", 2, "--time", "2:00:00", "--without", "fsdp2", "--submit")
    with contextlib.chdir(tmp_path):
        written = forge("launch", "slurm", file.name, *asked, environment=env)
    assert written.out == "Wrote mine.sbatch.\nSubmitted as job 42.\n", written.err

    def job(**more: str) -> int:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        given = {**os.environ, **env, "SLURM_JOB_ID": "42", "MASTER_PORT": port, "PREEMPT_AT": "", **more}
        done = subprocess.run(["bash", "mine.sbatch"], cwd=tmp_path, env=given, timeout=600, check=False)
        return done.returncode

    run = tmp_path / "runs" / "mine"
    assert job(PREEMPT_AT="2") == 75, _said(tmp_path)
    assert job(SLURM_JOB_END_TIME=str(int(time.time()) + 60)) == 75, _said(tmp_path)
    assert _outcome(run)["reason"].startswith("the Slurm job ends in ")
    assert (tmp_path / "asked").read_text() == "requeue 42\n" * 2
    assert job() == 0, _said(tmp_path)
    assert (tmp_path / "asked").read_text() == "requeue 42\n" * 2, "a job that is done is not queued again"
    assert {check(one.path, contents=True) for one in found(run / "checkpoints")} == {""}
    assert json.loads((run / "environment.json").read_text())["launcher"] == "slurm"

    whole = ("--nproc", 2, "--without", "fsdp2", "--run-dir", tmp_path / "runs", "--name", "whole", "--quiet")
    ended = forge_process("train", file, *whole, cwd=tmp_path, env={**os.environ, **env})
    assert ended.code == 0, ended.err
    assert _numbers(run) == _numbers(tmp_path / "runs" / "whole")


def _numbers(run: Path) -> list[dict[str, Any]]:
    lines = records.read(run / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key not in records.TIMINGS} for line in lines]


def _outcome(run: Path) -> dict[str, Any]:
    events = records.read(run / "events.jsonl")
    return next(event for event in reversed(list(events)) if event["event"] == "run_finished")


def _said(folder: Path) -> str:
    return "\n".join((folder / f"rank-{rank}.txt").read_text() for rank in range(2))
