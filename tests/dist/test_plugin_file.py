"""`-p ./file.py` on two processes: each of them imports the file from where the command was typed."""

from __future__ import annotations

from pathlib import Path

import pytest

import toys
from test_launch import here

PLUGIN = """
import os
from pathlib import Path
from forge_train import Plugin, hookimpl

class RanksSeen(Plugin):
    \"""Leaves a file for every rank.\"""
    api = (1, 0)

    @hookimpl
    def on_step(self, step):
        Path(f"seen-{os.environ['RANK']}").touch()
"""


@pytest.mark.dist
def test_a_file_on_two_processes_and_resumed(tmp_path: Path) -> None:
    (tmp_path / "seen.py").write_text(PLUGIN, encoding="utf-8")
    values = {"train.steps": 2, "checkpoint.every": 1}
    file = toys.write_config(tmp_path, "layouts:Replicas", **values)
    done = here(tmp_path, str(file), "-p", "./seen.py", "--nproc", "2", "--name", "seen")
    assert done.code == 0, done.err
    for rank in (0, 1):
        (tmp_path / f"seen-{rank}").unlink()
    resumed = here(tmp_path, "--resume", "runs/seen", "-s", "train.steps=3", "--nproc", "2")
    assert resumed.code == 0, resumed.err
    assert (tmp_path / "seen-0").exists()
    assert (tmp_path / "seen-1").exists()
