"""Runs that continue with fewer processes after failures, and with all of them later."""

from __future__ import annotations

import inspect
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

import toys
import warm
from forge_cli import environment, forge, forge_process, one_message
from forge_train.engine import train
from forge_train.run.records import read
from forge_train_tools.launching.agent import hasten_rendezvous
from forge_train_tools.launching.launch import Ended, Restart, WorkerCommand, launch

pytestmark = [pytest.mark.dist]
STEPS = 10
VALUES = {"train.steps": STEPS, "train.global_batch": 8, "train.evaluate_every": 0, "checkpoint.every": 2}


@pytest.mark.e2e
def test_four_ranks_two_and_four_again(tmp_path: Path) -> None:
    """Three do not divide the global batch: two go on, each with twice as many micro-batches."""
    file = toys.write_config(tmp_path, "dying:Dwindles", "fsdp2", "csv", **VALUES)
    env = environment()
    env["PYTHONPATH"] += f"{os.pathsep}{Path(__file__).parent}"
    options = ("--nproc", 4, "--max-restarts", 3, "--min-nproc", 2, "--run-dir", tmp_path, "--name", "run")
    ended = forge_process("train", file, *options, "--quiet", "--without", "tensorboard", preloaded=True, env=env)
    assert ended.code == 0, ended.err
    warnings = [line for line in ended.err.splitlines() if "start again" in line]
    assert [re.split(r"rank-\d\.log\. ", line)[1] for line in warnings] == [
        "All ranks start again (attempt 1 of 3).",
        "Place 3 failed twice in a row; 2 of 4 ranks will start again (attempt 2 of 3).",
        "All ranks start again (attempt 3 of 3).",
    ]
    assert warnings[1].startswith("Warning: Rank 3 was killed by SIGKILL")
    assert warnings[2].startswith("Warning: Rank 1 was killed by SIGKILL")
    events = list(read(tmp_path / "run" / "events.jsonl"))
    assert [one["world"] for one in events if one["event"] == "run_started"] == [4, 2, 4]
    restarted = [(one["attempt"], one["world"], one["step"]) for one in events if one["event"] == "restarted"]
    assert restarted == [(1, 4, 5), (2, 2, 5), (3, 4, 7)]
    assert [one["step"] for one in events if one["event"] == "resumed"] == [4, 6]
    ours = list(read(tmp_path / "run" / "metrics.jsonl"))
    alone = toys.run(tmp_path, steps=STEPS, config=VALUES).numbers
    assert [line["step"] for line in ours] == list(range(1, STEPS + 1))
    assert [line["tokens"] for line in ours] == [line["tokens"] for line in alone], "the same global batch"
    for line, expected in zip(ours, alone, strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)


def test_a_layout_that_fits_no_fewer_says_so(tmp_path: Path) -> None:
    """In one sentence, before it starts; a mistake of an attempt still ends it."""
    file = toys.write_config(tmp_path, "layouts:Columns", **VALUES, **{"columns.plan": ["gate"]})
    options = ("--nproc", 2, "--max-restarts", 2, "--min-nproc", 1, "--run-dir", tmp_path, "--quiet")
    fixed = forge("train", file, *options, "-s", "parallel.dp_shard=2", "--name", "fixed", environment=environment())
    assert fixed.code == 2
    assert fixed.err.splitlines()[0] == (
        "Warning: --min-nproc 1: every restart takes all 2 processes, because the run can't use fewer: "
        "--set parallel.dp_shard=2: parallel.dp_shard: pp × dp_replicate × dp_shard × cp × tp = 1 × 1 × 2 × 1 × 1 = 2, "
        "but there is 1 process."
    )
    assert "start again" not in fixed.err


@pytest.mark.unit
@pytest.mark.parametrize(("restarts", "name", "warned"), [("2", "", True), ("2", "named", False), ("0", "", False)])
def test_a_run_that_a_restart_would_not_continue(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    restarts: str,
    name: str,
    warned: bool,
) -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for key, value in {**torchrun, "TORCHELASTIC_MAX_RESTARTS": restarts}.items():
        monkeypatch.setenv(key, value)
    train(toys.setup(folder=tmp_path, config={"train.steps": 1, "run.name": name}), run_dir=tmp_path / "runs")
    assert ("A restart by torchrun begins a new run" in caplog.text) is warned


@pytest.mark.unit
def test_torch_names_who_tells_an_event_without_reading_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    class Holder(dynamic_rendezvous._BackendRendezvousStateHolder):
        def __init__(self) -> None:
            vars(self)["_settings"] = SimpleNamespace(run_id="1")

        def sync(self) -> None:
            self._record("synced")

    names: list[str] = []
    monkeypatch.setattr(dynamic_rendezvous, "get_method_name", dynamic_rendezvous.get_method_name)
    monkeypatch.setattr(dynamic_rendezvous, "construct_and_record_rdzv_event", lambda name, **_: names.append(name))
    monkeypatch.setattr(inspect, "stack", None)
    hasten_rendezvous()
    Holder().sync()
    assert names == ["Holder.sync"]


def test_what_min_nproc_may_be(tmp_path: Path) -> None:
    file = toys.write_config(tmp_path)
    more = ("--run-dir", tmp_path, "--nproc", 2)
    told = one_message(forge("train", file, "--min-nproc", 1, *more), 2)
    assert told == "--min-nproc 1 applies to restarts; add --max-restarts."
    told = one_message(forge("train", file, "--min-nproc", 2, "--max-restarts", 1, *more), 2)
    assert told == "--min-nproc 2: must be below the number of processes, which is 2."
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("nproc", "code"), [(1, 75), (2, 0)])
def test_a_rank_that_is_killed_once_it_has_said_how_it_ended(tmp_path: Path, nproc: int, code: int) -> None:
    """It is no reason to start again."""
    attempts, told, ended = _launched(tmp_path, nproc, code)
    assert (attempts, told, ended.code, ended.signal) == (nproc, [], code, 0)


def test_no_attempt_begins_after_a_signal(tmp_path: Path) -> None:
    """Also if it came when no rank was there to hear it."""
    attempts, told, ended = _launched(tmp_path, 1, 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert (attempts, len(told), ended.code) == (1, 1, 128 + signal.SIGTERM)


def _launched(
    folder: Path, nproc: int, code: int, on_restart: Callable[[], object] = lambda: None
) -> tuple[int, list[str], Ended]:
    """Processes that were started, restarts that were told, and the end."""
    told: list[str] = []

    def tell(restart: Restart) -> None:
        told.append(restart.why)
        on_restart()

    notes = folder / "attempts"
    task = WorkerCommand("dying:dies_closing", {"attempts": str(notes), "code": code}, folder / "launch", folder)
    with warm.ranks():
        ended = launch(task, nproc, max_restarts=2, on_restart=tell)
    assert not list(task.folder.glob(".*")), "nothing is left over"
    return notes.read_text(encoding="utf-8").count("again"), told, ended
