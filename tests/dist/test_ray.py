"""`forge launch ray` in Ray's local mode: its script starts two ranks, which train as two local processes do."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import toys
from forge_cli import forge

pytestmark = [pytest.mark.dist, pytest.mark.e2e, pytest.mark.extended]
pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
TESTS = Path(__file__).parent.parent


def test_two_workers_train_as_two_processes_do(tmp_path: Path) -> None:
    values = {"train.steps": 4, "log.every": 1, "checkpoint.every": 2}
    file = toys.write_config(tmp_path, "layouts:Replicas", **values).rename(tmp_path / "mine.toml")
    env = {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS / "dist")])}
    with contextlib.chdir(tmp_path):
        written = forge("launch", "ray", file.name, "--nproc", "2", "--without", "fsdp2", environment=env)
    assert written.code == 0, written.err
    local = {"RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    ended = subprocess.run(
        [sys.executable, "mine.ray.py"], cwd=tmp_path, env={**os.environ, **env, **local}, capture_output=True,
        text=True, timeout=600, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    run = tmp_path / "runs" / "mine"
    whole = (
        "--nproc",
        2,
        "--without",
        "fsdp2",
        "--run-dir",
        tmp_path / "runs",
        "--name",
        "whole",
        "--quiet",
    )
    assert forge("train", file, *whole, environment=env).code == 0
    tensors = [
        sorted((one / "checkpoints" / "step-00000004").glob("rank-*.safetensors"))
        for one in (run, run.with_name("whole"))
    ]
    assert len(tensors[0]) > 0
    assert [one.read_bytes() for one in tensors[0]] == [one.read_bytes() for one in tensors[1]]
