"""Checkpoints elsewhere, of a run on two ranks: the main one copies, and all of them continue from what it fetched."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import toys
from forge_cli import forge_process
from forge_train.run.records import read
from forge_train_kit.stores.store import Store
from saving import ASYNC

pytestmark = [pytest.mark.dist, pytest.mark.e2e]


def test_a_run_on_two_ranks_goes_on_from_a_folder_elsewhere(tmp_path: Path) -> None:
    far = tmp_path / "far"
    file = toys.write_config(tmp_path, **{"checkpoint.every": 2, "checkpoint.folder": str(far), **ASYNC})
    for steps in (4, 6):
        options = ["--nproc", 2, "--quiet", "--run-dir", tmp_path / "runs", "-s", f"train.steps={steps}"]
        ended = forge_process("train", file, "--name", "run", *options, preloaded=True, timeout=300)
        assert ended.code == 0, ended.err
        events = list(read(tmp_path / "runs" / "run" / "events.jsonl"))
        assert {event["step"] for event in events if event["event"] == "checkpoint_copied"} >= {steps}
        assert [stored.step for stored in Store.of_run(str(far), "run").newest()] == [steps, steps - 2]
        if steps == 4:
            shutil.rmtree(tmp_path / "runs")
    assert [event["step"] for event in events if event["event"] == "resumed"] == [4]
