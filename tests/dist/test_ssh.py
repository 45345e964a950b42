"""`forge launch ssh` trains on two nodes: this machine, twice."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import toys
from forge_cli import command
from forge_train.run import records

pytestmark = [pytest.mark.dist, pytest.mark.e2e, pytest.mark.slow]
TESTS = Path(__file__).parent.parent
SSH = """#!/bin/bash
while [ "$1" != -- ]; do shift; done
[ "$2" = localhost ] || [ ! -d other ] || set -- "$1" "$2" "${3//$PWD/$PWD/other}"
exec bash -c "$3"
"""
"""The second node has a disk of its own, where there is a folder `other`."""


def launch(tmp_path: Path, name: str) -> subprocess.CompletedProcess[str]:
    """Train on `localhost` and `127.0.0.1`."""
    file = toys.write_config(tmp_path, "layouts:Replicas", **{"checkpoint.every": 2})
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH, encoding="utf-8")
    (tmp_path / "bin" / "ssh").chmod(0o755)

    own = {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS / "dist")]),
    }
    if (tmp_path / "other").exists():
        (tmp_path / "other" / file.name).write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    hosts = ("localhost", "127.0.0.1", "--without", "fsdp2", "--name", name, "--submit")
    return subprocess.run(
        command("launch", "ssh", file.name, *hosts),
        cwd=tmp_path, env={**os.environ, **own}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_two_nodes(tmp_path: Path) -> None:
    done = launch(tmp_path, "near")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "near"
    alone = toys.run(tmp_path, config={"train.steps": 4})
    for ours, theirs in zip(_numbers(run), alone.numbers, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert json.loads((run / "environment.json").read_text())["launcher"] == "forge launch"
    assert done.stdout.count("step 4/4 · loss") == 1, "rank 0 alone is on the screen"


@pytest.mark.extended
def test_nodes_without_a_shared_disk(tmp_path: Path) -> None:
    """In CI, test_launch.py has ranks whose folders differ."""
    (tmp_path / "other").mkdir()
    far = launch(tmp_path, "far")
    assert far.returncode == 2
    assert "runs/far: rank 1 on " in far.stderr
    assert " does not see what rank 0 on " in far.stderr
    assert not (tmp_path / "runs" / "far").exists()


def _numbers(run: Path) -> list[dict[str, Any]]:
    return list(records.read(run / "metrics.jsonl"))
