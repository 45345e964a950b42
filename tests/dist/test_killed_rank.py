"""The quickstart on four processes with fsdp2, tp and ac: one of them is killed, and the run repeats itself exactly.

CI kills one of two processes, in `test_launch.py`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from forge_cli import environment, start
from forge_train.run.records import TIMINGS, read

pytestmark = [pytest.mark.e2e, pytest.mark.dist, pytest.mark.extended, pytest.mark.timeout(900)]

ARGUMENTS = (
    *("train", "--plugins", "fsdp2,tp,ac", "--nproc", 4, "-s", "parallel.tp=2", "--max-restarts", 1, "--name", "run"),
    *("-s", "train.steps=10", "-s", "checkpoint.every=5", "-s", "log.every=1", "-s", "train.evaluate_every=0"),
    *("--without", "sample,tensorboard"),
)
SECONDS = 15.0
TICKS = os.sysconf("SC_CLK_TCK")
CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Clock:
    """A moment: wall time, CPU seconds of a process with its children, and of the whole machine."""

    wall: float
    ours: float
    everybody: float

    @classmethod
    def now(cls, pid: int) -> Clock:
        mine = stat(pid)
        ours = sum(map(int, mine[11:15])) + sum(int(ticks) for child in children(pid) for ticks in stat(child)[11:13])
        machine = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
        user, nice, system, _idle, _waiting, *interrupts = map(int, machine[:8])
        return cls(time.monotonic(), ours / TICKS, (user + nice + system + sum(interrupts)) / TICKS)

    def alone(self, before: Clock) -> float:
        """Seconds since then, without those in which the cores worked for somebody else."""
        others = (self.everybody - before.everybody) - (self.ours - before.ours)
        return self.wall - before.wall - max(others, 0) / CORES


def stat(pid: int) -> list[str]:
    """/proc/PID/stat from the state on; zeros of a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:
        return ["0"] * 20


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]


def lines(run: Path) -> dict[int, dict[str, Any]]:
    """Step → its metrics, without what differs from run to run."""
    return {
        line["step"]: {key: repr(value) for key, value in line.items() if key not in TIMINGS}
        for line in read(run / "metrics.jsonl")
    }


def wait(what: Any, seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The run, under way."""
    started = start(*ARGUMENTS, cwd=tmp_path, env=environment())
    yield started
    started.kill()
    started.communicate()


def test_a_killed_rank_costs_15_seconds_and_no_number(tmp_path: Path, process: subprocess.Popen[str]) -> None:
    run = tmp_path / "runs" / "run"
    wait(lambda: process.poll() is not None or 8 in lines(run))
    assert process.poll() is None, process.communicate()
    ranks = children(process.pid)
    assert len(ranks) == 4
    os.kill(ranks[2], signal.SIGKILL)
    killed, before = Clock.now(process.pid), lines(run)

    def events(name: str) -> list[dict[str, Any]]:
        return [event for event in read(run / "events.jsonl") if event["event"] == name]

    wait(lambda: events("resumed"))
    wait(lambda: 6 in lines(run))
    again = Clock.now(process.pid)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert "Rank 2 (dp_shard 1, tp 0) was killed by SIGKILL" in err
    assert err.count("All ranks start again (attempt 1 of 1)") == 1
    assert "step 10/10 · loss" in out
    assert [event["step"] for event in events("resumed")] == [5]
    after = lines(run)
    assert list(after) == list(range(1, 11))
    assert {step: after[step] for step in before} == before, "the steps after the checkpoint were done twice, alike"
    assert {6, 7, 8} <= before.keys()
    assert len({line["loss"] for line in after.values()}) == 10
    took = again.alone(killed)
    print(f"killed → first step: {took:.1f} s alone, {again.wall - killed.wall:.1f} s in all")
    assert took <= SECONDS
