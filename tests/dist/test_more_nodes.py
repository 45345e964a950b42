"""Machines that launchers start ranks on, that are lost and come back, and four of them: see `nodes`.

In CI, `test_nodes.py` has two machines, `test_ssh.py` the launcher by ssh, and `test_elastic.py` loses ranks.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import forge_cli
import nodes
import toys
from forge_train.run.records import read
from test_nodes import DIST, Two, events, needs_machines, numbers

pytestmark = [pytest.mark.dist, pytest.mark.e2e, pytest.mark.extended, needs_machines]
STEPS = 12
VALUES = {
    "train.steps": STEPS,
    "train.global_batch": 8,
    "train.evaluate_every": 0,
    "checkpoint.every": 2,
    "run.timeout": 10.0,
}
PLUGINS = ("layouts:Replicas", "cables:Cable", "cables:Rows", "cables:Until")
LOST = "[ -e lost ] || { touch lost; ip link set eth0 down; kill -9 $PPID $LAUNCHER; }"
"""What a rank does whose machine is gone, once."""
SSH = """#!/bin/bash
while [ "$1" != -- ]; do shift; done
exec nsenter -t "$(cat {pids}/$2)" -n -u -m bash -c "$3"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    toys.write_config(tmp_path, *PLUGINS, **VALUES)
    os.mkfifo(tmp_path / "told")
    return tmp_path


@pytest.fixture
def two(folder: Path) -> Iterator[Sequence[nodes.Node]]:
    with nodes.machines(2, folder) as machines:
        yield machines


def environment(**more: str) -> dict[str, str]:
    own = forge_cli.environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", **more)
    return {**own, "PYTHONPATH": f"{own['PYTHONPATH']}{os.pathsep}{DIST}"}


def train(*more: str) -> list[str]:
    """What each launcher starts; without `fsdp2`, which no toy needs."""
    return ["train", "toy.toml", "--name", "run", "--without", "fsdp2,tensorboard", *more]


def lost_at(step: int) -> list[str]:
    return ["-s", f"cable.does={LOST}", "-s", f"cable.at={step}"]


def start(node: nodes.Node, folder: Path, *command: str, **more: str) -> subprocess.Popen[Any]:
    """Start a launcher on a machine, which says what it says in a file."""
    with (folder / f"{node.name}.log").open("a", encoding="utf-8") as log:
        return node.start(*command, cwd=folder, env=environment(**more), stdout=log, stderr=log)


def said(folder: Path, node: nodes.Node) -> str:
    return (folder / f"{node.name}.log").read_text(encoding="utf-8")


def alone(folder: Path) -> Path:
    """The same on one process."""
    (folder / "alone").mkdir()
    toys.run(folder / "alone", "cables:Rows", steps=STEPS, config=VALUES, name="run")
    return folder / "alone" / "run"


def rows(run: Path) -> list[Counter[str]]:
    """Rows that each step of the run trained on, on all ranks, where it did it last."""
    told = [line for file in run.glob("rows-*.jsonl") for line in read(file)]
    found = []
    for step in range(1, STEPS + 1):
        last = max(one["attempt"] for one in told if one["step"] == step)
        lines = [one["rows"] for one in told if (one["step"], one["attempt"]) == (step, last)]
        found.append(Counter(row for line in lines for row in line))
    return found


def agrees(run: Path, one: Path) -> None:
    """Every step trained on the same rows, each once, and its loss is that of one process."""
    assert rows(run) == rows(one)
    assert all(max(step.values()) == 1 for step in rows(run))
    ours, theirs = numbers(run), numbers(one)
    assert [line["step"] for line in ours] == list(range(1, STEPS + 1))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["tokens"] == other["tokens"]
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)


def agent(node: nodes.Node, folder: Path, *more: str) -> subprocess.Popen[Any]:
    """Torchrun, with as many machines as there are."""
    where = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "node-0:29400", "--rdzv-id", "job", "--local-addr", node.name)
    sizes = ("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3")
    patience = ("--rdzv-conf", "last_call_timeout=3,keep_alive_interval=1")
    return start(
        node, folder, "torch.distributed.run", *where, *sizes, *patience, "-m", "forge_train_cli", *train(*more)
    )


def test_two_machines_one_and_two_again(folder: Path, two: Sequence[nodes.Node]) -> None:
    """One is lost at step 5, and comes back at step 9: the global batch stays, and no row is lost or seen twice."""
    more = [*lost_at(5), "-s", f"until.told={folder / 'told'}"]
    first, second = (agent(node, folder, *more) for node in two)
    second.wait()
    two[1].does("ip link set eth0 up")
    assert (folder / "told").read_text(encoding="utf-8") == "alone"
    again = agent(two[1], folder, *more)
    assert (first.wait(), again.wait()) == (0, 0), said(folder, two[0])
    run = folder / "runs" / "run"
    assert [(one["world"], one["step"]) for one in events(run, "run_started")] == [(2, 0), (1, 4), (2, 9)]
    agrees(run, alone(folder))


def test_a_lost_machine_comes_back(folder: Path, two: Sequence[nodes.Node]) -> None:
    """Forge's own launcher of a node waits for it; the run is then the undisturbed one, bit for bit."""

    def node(at: int, *more: str) -> subprocess.Popen[Any]:
        where = {"PET_NNODES": "2", "PET_NODE_RANK": str(at), "PET_MASTER_ADDR": "node-0", "PET_MASTER_PORT": "29500"}
        command = ("forge_train_tools.launching.node", "--max-restarts", "2", "--", *train(*more))
        return start(two[at], folder, *command, **where)

    for which in ("lost", "kept"):
        more = ["--name", which, *lost_at(5 if which == "lost" else STEPS + 1)]
        first, second = (node(at, *more) for at in range(2))
        if which == "lost":
            second.wait()
            two[1].does("ip link set eth0 up")
            second = node(1, *more)
        assert (first.wait(), second.wait()) == (0, 0), said(folder, two[0])
    assert "The ranks of this node start again (attempt 1 of 2)." in said(folder, two[0])
    runs = folder / "runs"
    assert [one["step"] for one in events(runs / "lost", "resumed")] == [4]
    assert numbers(runs / "lost") == numbers(runs / "kept")
    agrees(runs / "lost", alone(folder))


@pytest.mark.parametrize(("machines", "nproc"), [(2, 2), (4, 1)])
def test_launched_by_ssh(folder: Path, machines: int, nproc: int) -> None:
    """From a desk that has no part in it; ranks of one machine, and of several."""
    (folder / "bin").mkdir()
    (folder / "bin" / "ssh").write_text(SSH.format(pids=shlex.quote(str(folder))), encoding="utf-8")
    (folder / "bin" / "ssh").chmod(0o755)
    with nodes.machines(machines, folder) as some:
        for node in some:
            (folder / node.name).write_text(str(node.pid), encoding="utf-8")
        hosts = [node.name for node in some]
        command = ("launch", "ssh", "toy.toml", *hosts, "--nproc", nproc, "--name", "run", "--submit")
        own = environment(PATH=f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
        ended = forge_cli.forge_process(*command, "--without", "fsdp2", "-p", "health", cwd=folder, env=own)
    assert ended.code == 0, ended.err
    run = folder / "runs" / "run"
    agrees(run, alone(folder))
    log = (run / "log" / "rank-0.log").read_text(encoding="utf-8")
    assert f" on {machines * nproc} links between machines" in log


def test_a_cable_that_takes_long_and_loses_packets(folder: Path, two: Sequence[nodes.Node]) -> None:
    """Slower, and no number differs."""
    for node in two:
        node.sends_whole_packets()
    two[1].worsen(0.01, loss=0.02)
    ends = Two(two, folder).train("run", "--without", "fsdp2,tensorboard")
    assert [one.code for one in ends] == [0, 0], ends
    agrees(folder / "runs" / "run", alone(folder))
