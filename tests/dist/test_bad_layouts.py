"""Layouts that can't be, and ranks that are lost: one clear message each, and exit code 2 or 1.

A rank that raises, one that hangs, and nodes that differ are in test_launch.py; what differs is in test_laws.py.
"""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path

import pytest

import toys
from forge_cli import DECODER, TESTS, environment, forge, forge_process, one_message
from forge_train.checkpoint.checkpoint import check, found
from forge_train_tools.launching.launch import left

pytestmark = [pytest.mark.dist, pytest.mark.e2e]

AXES = "pp × dp_replicate × dp_shard × cp × tp"


@pytest.fixture
def decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A configuration in the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("\n".join(f"line {n}: {n * n % 97}" for n in range(500)), encoding="utf-8")
    Path("my.toml").write_text(f'{DECODER}[text]\npath = "text.txt"\nbaseline = false\n', encoding="utf-8")
    return "my.toml"


@pytest.mark.parametrize(
    ("nproc", "sets", "says"),
    [
        (4, ["parallel.tp=2", "parallel.dp_shard=1"], f"{AXES} = 1 × 1 × 1 × 1 × 2 = 2, but there are 4 processes."),
        (2, ["parallel.tp=4"], f"parallel.tp: {AXES} = 1 × 1 × 1 × 1 × 4 = 4, but there are 2 processes."),
        (4, ["parallel.dp_shard=0"], "parallel.dp_shard: must be at least 1, or -1 for what is left over; it is 0."),
        (3, ["parallel.tp=2"], "= 1 × 1 × 1 × 2 = 2 does not divide the 3 processes."),
        (6, ["parallel.dp_replicate=2", "parallel.tp=2"], "= 1 × 2 × 1 × 2 = 4 does not divide the 6 processes."),
        (3, [], "4 is not a multiple of micro_batch × data-parallel ranks = 2 × 3 = 6."),
        (2, ["parallel.etp=3"], "--set parallel.etp=3: parallel.etp: must be 1 or tp (1); it is 3."),
        (2, ["parallel.ep=3"], "--set parallel.ep=3: parallel.ep: must divide dp_shard × cp × tp (2); it is 3."),
    ],
)
def test_a_layout_that_does_not_fit_the_world_starts_nothing(
    decoder: str, nproc: int, sets: list[str], says: str
) -> None:
    ended = forge("train", decoder, "--nproc", nproc, *(part for value in sets for part in ("-s", value)))
    assert says in one_message(ended, 2)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("arguments", "world", "says"),
    [
        (["-s", "parallel.tp=2"], 2, "parallel.tp is 2, but no enabled plugin covers the axis 'tp'."),
        (
            ["-p", "tp", "-s", "parallel.tp=4"],
            4,
            "it has 2 heads of 8 features, and every rank needs whole ones; tp (4)",
        ),
        (
            [
                "-p",
                "tp",
                "-s",
                "parallel.tp=4",
                "-s",
                "decoder.heads=4",
                "-s",
                "decoder.vocabulary=257",
                "-s",
                "decoder.hidden=50",
            ],
            4,
            "its 50 outputs can't be split evenly; tp (4) must divide them.",
        ),
        (["-p", "tp,toys:ToyModel", "-s", "parallel.tp=2"], 2, "the model (Tower) declares no tensor_plan()"),
    ],
)
def test_a_model_that_can_not_be_laid_out_so(decoder: str, arguments: list[str], world: int, says: str) -> None:
    more = ["-s", "train.micro_batch=1"]
    if "toys" in "".join(arguments):
        Path(decoder).write_text(re.sub(r"\[decoder\][^\[]*", "", Path(decoder).read_text()), encoding="utf-8")
    assert says in one_message(forge("plan", decoder, "--world", world, *arguments, *more), 2)


def test_a_run_on_a_layout_that_can_not_hold_its_model_stays_as_it_was(decoder: str) -> None:
    one_head = ("-s", "decoder.heads=1", "-s", "checkpoint.every=2")
    ended = forge("train", decoder, "--quiet", "--name", "run", *one_head)
    assert ended.code == 0, ended.err
    run = Path("runs/run")
    before = {file: file.read_bytes() for file in run.glob("*.*") if file.is_file()}
    os.utime(run / "config.toml", (time.time() + 3600, time.time() + 3600))  # by a file server's clock, which is fast
    wider = ("--nproc", 2, "-p", "tp", "-s", "parallel.tp=2", "-s", "train.steps=6")
    ended = forge_process("train", "--resume", run, *wider, "--max-restarts", 1, preloaded=True, timeout=600)
    message = one_message(ended, 2)
    assert "parallel.tp = 2 does not fit Transformer and its tensor_plan():" in message
    assert "it has 1 heads of 16 features, and every rank needs whole ones; tp (2) must divide 1." in message
    assert [(saved.step, check(saved.path, contents=True)) for saved in found(run / "checkpoints")] == [
        (3, ""),
        (2, ""),
    ]
    for kept in (run / "metrics.jsonl", run / "outcome.json"):
        assert kept.read_bytes() == before[kept]
    ended = forge("train", "--resume", run, "--quiet", "-s", "train.steps=4")
    assert ended.code == 0, ended.err


@pytest.mark.extended
def test_a_rank_that_dies_at_start_up_and_in_mid_step_and_one_that_hangs(decoder: str, tmp_path: Path) -> None:
    """Who, of which stage, when, where its log is, and what became of the others."""
    env = environment(PYTHONPATH=os.pathsep.join([str(TESTS), str(TESTS / "dist")]))
    sets = ("-s", "parallel.pp=2", "-s", "decoder.layers=2", "-s", "run.timeout=8")
    arguments = ("train", decoder, "--nproc", 2, "--max-restarts", 2, "--name", "died", "--quiet")
    ended = forge_process(*arguments, "-p", "pp,dying:Dies", *sets, preloaded=True, cwd=tmp_path, env=env)
    for attempt, when in ((1, "before the first step was logged"), (2, "after step [23]")):
        assert re.search(
            rf"Warning: Rank 1 \(stage 1\) was killed by SIGKILL {when}; .* "
            rf"Its log is \S*rank-1\.log\. All ranks start again \(attempt {attempt} of 2\)\.",
            ended.err,
        )
    message = one_message(ended, 1)
    assert re.match(
        r"Rank 1 \(stage 1\) hangs after step [23]; the others waited for it in .*\n +at \S*dying\.py", message
    )
    assert re.search(r"^Rank 0 \(stage 0\) ended because of it", message, re.MULTILINE)
    waited = left(Path("runs/died/log/launch"), 2, 0)
    assert waited is not None
    assert waited.message.startswith("Rank 1 (stage 1), which holds another part of the pipeline, does not answer: ")
    assert "Timed out waiting 8000ms" in waited.message, "run.timeout, not run.start_timeout"


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        world = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        env = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **world)
        env["PYTHONPATH"] += os.pathsep + str(TESTS / "dist")
        file = toys.write_config(tmp_path, "layouts:Replicas")
        ended = forge_process("train", file, "--without", "fsdp2", preloaded=True, cwd=tmp_path, env=env)
    message = one_message(ended, 1)
    assert (
        message
        == f"Rank 0 can't listen at 127.0.0.1:{port}: the port is in use. Set MASTER_PORT to a free one, on all nodes."
    )
    assert not (tmp_path / "runs").exists()
