"""torchrun's own elasticity: nodes that join, are lost, and join again, while one run continues.

In CI, `test_launch.py` starts two nodes, and `test_elastic.py` loses ranks and gets them back.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import toys
from forge_cli import environment
from forge_train import Plugin, hookimpl
from forge_train.run.records import read

pytestmark = [pytest.mark.dist, pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(1800)]
VALUES = {"train.steps": 20_000, "train.evaluate_every": 0, "checkpoint.every": 5, "checkpoint.keep": 2}
Node = Callable[[], "subprocess.Popen[bytes]"]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]


def lose(node: subprocess.Popen[bytes]) -> None:
    """All that runs on a node ends at once."""
    for pid in [node.pid, *children(node.pid)]:
        os.kill(pid, signal.SIGKILL)
    node.wait()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """Starts an agent of one process, all of which belong to one job."""
    file = toys.write_config(tmp_path, "layouts:Replicas", "layouts:Slow", **VALUES, **{"slow.seconds": 0.05})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"localhost:{free.getsockname()[1]}"
    job = ("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "job")
    sizes = ("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-conf", "last_call_timeout=2")
    run = ("train", file, "--name", "run", "--run-dir", tmp_path, "--quiet", "--without", "fsdp2,tensorboard")
    command = [sys.executable, "-m", "torch.distributed.run", *job, *sizes, "-m", "forge_train_cli", *map(str, run)]
    env = environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    env["PYTHONPATH"] += f"{os.pathsep}{Path(__file__).parent}"
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        with (tmp_path / f"node-{len(started)}.log").open("wb") as log:
            started.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
        return started[-1]

    yield start
    for one in started:
        if one.poll() is None:
            lose(one)


def test_nodes_join_and_are_lost_and_join(tmp_path: Path, node: Node) -> None:
    """The one that joins last has never restarted anything, and the first has: their counts differ."""
    run = tmp_path / "run"

    def worlds() -> list[int]:
        return [event["world"] for event in read(run / "events.jsonl") if event["event"] == "run_started"]

    def wait(*expected: int) -> None:
        deadline, steps = time.monotonic() + 600, 0
        while worlds() != [*expected] or steps < 3:
            since = [event for event in read(run / "events.jsonl") if event["event"] in ("resumed", "run_started")]
            begun = since[-1]["step"] if since else 0
            steps = sum(line["step"] > begun for line in read(run / "metrics.jsonl"))
            logs = [file.read_text(encoding="utf-8")[-3000:] for file in sorted(tmp_path.glob("node-*.log"))]
            assert time.monotonic() < deadline, (worlds(), logs)
            time.sleep(0.2)

    node()
    wait(1)
    second = node()
    wait(1, 2)
    lose(second)
    wait(1, 2, 1)
    node()
    wait(1, 2, 1, 2)
    ours = list(read(run / "metrics.jsonl"))
    assert [line["step"] for line in ours] == list(range(1, len(ours) + 1))
    saved = 0
    for event in read(run / "events.jsonl"):
        saved = event["step"] if event["event"] == "checkpoint_saved" else saved
        assert event["event"] != "resumed" or event["step"] == saved

    class Enough(Plugin):
        @hookimpl
        def on_start(self, job: Any) -> None:
            self.control = job.control

        @hookimpl
        def on_step(self, step: Any) -> None:
            if step.step == len(ours):
                self.control.stop("enough")

    alone = toys.run(tmp_path, Enough, steps=VALUES["train.steps"], config=VALUES).numbers
    for line, expected in zip(ours, alone, strict=True):
        assert line["tokens"] == expected["tokens"]
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-4)
