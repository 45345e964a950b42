"""Saving in the background on several ranks: the old values, one moment for all, one message, and equal shares."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

import toys
from forge_cli import environment, forge_process
from forge_train.checkpoint.checkpoint import check, found
from forge_train.run.records import read
from forge_train_tools.testing import Pool
from saving import ASYNC

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
LAYOUTS: dict[str, tuple[int, list[str], dict[str, Any]]] = {
    "fsdp2": (2, [], {}),
    "ddp": (2, ["ddp"], {}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_overwritten_on_every_rank_the_files_hold_the_old_values(ranks: Pool, tmp_path: Path, layout: str) -> None:
    world, plugins, config = LAYOUTS[layout]

    def saved(name: str, *, behind: bool) -> list[dict[str, Any]]:
        arguments = {"folder": str(tmp_path), "plugins": plugins, "config": config, "name": name}
        return ranks.run("saving_cases:save", world, timeout=100, behind=behind, **arguments)

    old, at_once = saved("behind", behind=True), saved("at_once", behind=False)
    assert old[0]["contents"] == at_once[0]["contents"]
    assert all({"model", "optimizer", "random"} <= {name.partition(".")[0] for name in one["names"]} for one in old)
    assert len({str(one["told"]) for one in old}) == 1, "every rank is told in the same step"
    assert at_once[0]["told"][:2] == [["saving", 2, 2], ["saved", 2, 2]]
    assert next(at for kind, step, at in old[0]["told"] if (kind, step) == ("saved", 2)) > 3
    shares = [one["bytes"] for one in at_once]
    assert min(shares) > 0.9 * max(shares), "replicas share the work"
    assert shares == [one["bytes"] for one in old]
    for name in ("behind", "at_once"):
        whole = found(tmp_path / name / "checkpoints")
        assert [(one.step, check(one.path, contents=True)) for one in whole] == [(6, ""), (4, ""), (2, "")]


@pytest.mark.parametrize(("ending", "rank"), [("rank-00001-0.safetensors", 1), ("manifest.json", 0)])
def test_a_refusal_ends_every_rank_in_the_same_step_with_one_message(
    ranks: Pool, tmp_path: Path, ending: str, rank: int
) -> None:
    arguments = {"folder": str(tmp_path), "ending": ending, "rank": rank}
    told = ranks.run("saving_cases:refused", 2, timeout=100, **arguments)
    ((message, steps),) = {(one["error"], one["steps"]) for one in told}
    assert 2 <= steps <= 4
    target = tmp_path / "run" / "checkpoints" / "step-00000002"
    assert re.fullmatch(
        rf"{target}: can't save the checkpoint: No space left on device \(the disk at .* left\)\. "
        r"There is no earlier checkpoint\. Make room there, then go on\.",
        message,
    )
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == []


def test_ranks_agree_once_on_who_writes_what(ranks: Pool, tmp_path: Path) -> None:
    told = ranks.run("saving_cases:plans", 2, timeout=100, folder=str(tmp_path), plugins=["ddp"])
    assert told == [[True, True, True]] * 2


@pytest.mark.e2e
def test_a_rank_that_is_killed_while_a_thread_writes_costs_that_checkpoint_alone(tmp_path: Path) -> None:
    values = {"train.steps": 6, "checkpoint.every": 2, "checkpoint.keep": 9, "log.every": 1, "train.global_batch": 4}
    file = toys.write_config(tmp_path, "dying:DiesWriting", "layouts:Replicas", **values, **ASYNC)
    env = environment()
    env["PYTHONPATH"] += f"{os.pathsep}{Path(__file__).parent}"
    options = ["--nproc", 2, "--max-restarts", 1, "--without", "fsdp2", "--quiet", "--run-dir", tmp_path]
    ended = forge_process("train", file, "--name", "run", *options, preloaded=True, env=env, timeout=200)
    assert ended.code == 0, ended.err
    assert "Rank 1 was killed by SIGKILL" in ended.err
    events = list(read(tmp_path / "run" / "events.jsonl"))
    assert [event["step"] for event in events if event["event"] == "resumed"] == [2]
    assert [event["step"] for event in events if event["event"] == "checkpoint_saved"] == [2, 4, 6]
    whole = found(tmp_path / "run" / "checkpoints")
    assert [(one.step, check(one.path, contents=True)) for one in whole] == [(6, ""), (4, ""), (2, "")]
