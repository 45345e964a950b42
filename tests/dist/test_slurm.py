"""`forge launch slurm` on a Slurm of one machine: a node is lost, the time limit comes, and the run ends as if
undisturbed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import toys
from fake_slurm import Slurm
from forge_cli import Ended, forge
from forge_train.run import records

pytestmark = [pytest.mark.dist, pytest.mark.e2e, pytest.mark.slow]
TESTS = Path(__file__).parent.parent
STEPS = 8


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    made = Slurm(tmp_path / "slurm")
    yield made
    made.close()


def test_a_lost_node_and_a_time_limit(slurm: Slurm, tmp_path: Path) -> None:
    values = {"train.steps": STEPS, "log.every": 1, "checkpoint.every": 2, "trouble.at": 4, "limit.at": 3}
    plugins = ("layouts:Replicas", "layouts:Trouble", "fake_slurm:Limit")
    file = toys.write_config(tmp_path, *plugins, **values).rename(tmp_path / "mine.toml")
    env = {
        "PATH": f"{slurm.bin}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS / "dist")]),
    }

    def launch(*more: str) -> Ended:
        with contextlib.chdir(tmp_path):
            return forge("launch", "slurm", file.name, *more, environment=env)

    asked = ("--nodes", "2", "--time", "2:00:00", "--without", "fsdp2", "--submit")
    refused = launch(*asked, "--queue", "none")
    assert refused.code == 1
    assert "sbatch refuses mine.sbatch: sbatch: error: invalid partition specified: none" in refused.err
    written = launch(*asked, "--queue", "cpu")
    assert written.out == "Wrote mine.sbatch.\nSubmitted as job 40.\n", written.err
    assert "There is a job 'mine' already: 40 (PENDING)." in launch(*asked).err
    assert "PENDING" in launch("--status").out

    slurm.work()
    said = launch("--logs").out
    assert slurm.jobs[40].history == ["NODE_FAIL", "REQUEUED", "COMPLETED"], said
    assert "COMPLETED" in launch("--status").out
    run = tmp_path / "runs" / "mine"
    events = list(records.read(run / "events.jsonl"))
    first, second = (one["step"] for one in events if one["event"] == "resumed")
    assert first == 2 < second < STEPS
    assert [one["reason"] for one in events if one["event"] == "interrupted"] == ["SIGUSR1"]
    assert f"step {STEPS}/{STEPS}" in said

    whole = ("--nproc", 2, "--without", "fsdp2", "--run-dir", tmp_path / "runs", "--name", "whole", "--quiet")
    ended = forge("train", file, *whole, "-s", "trouble.what=", environment=env)
    assert ended.code == 0, ended.err
    assert _numbers(run) == _numbers(run.with_name("whole"))
    last = [one / "checkpoints" / f"step-{STEPS:08d}" for one in (run, run.with_name("whole"))]
    tensors = [sorted(one.glob("rank-*.safetensors")) for one in last]
    assert len(tensors[0]) > 0
    assert [one.read_bytes() for one in tensors[0]] == [one.read_bytes() for one in tensors[1]]


def _numbers(run: Path) -> list[dict[str, Any]]:
    lines = records.read(run / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key not in records.TIMINGS} for line in lines]
