"""Two machines, each with an address, a host name, a disk and a clock of its own: see `nodes`.

In CI their ranks are started with torchrun's variables, from a process that has torch. `test_more_nodes.py` starts
them by `forge launch ssh`, torchrun and Forge's own launcher of a node, loses machines, and has four.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import forge_cli
import nodes
import toys
from forge_train.checkpoint.checkpoint import check, found
from forge_train.run import records

pytestmark = [pytest.mark.dist, pytest.mark.e2e]
needs_machines = pytest.mark.skipif(bool(why := nodes.missing()), reason=f"no machines in namespaces: {why}")
DIST = Path(__file__).parent
STEPS = 6
VALUES = {"train.steps": STEPS, "train.evaluate_every": 0, "checkpoint.every": 2, "run.timeout": 5.0}
HOUR = 3600.0


@dataclass(frozen=True)
class Two:
    """Two machines, and the folder that they share."""

    machines: Sequence[nodes.Node]
    folder: Path

    def train(self, name: str, *more: object) -> list[forge_cli.Ended]:
        """Have one rank on each train; how they ended."""
        command = ("forge_train_cli", "train", self.folder / "toy.toml", "--name", name, *more)
        started = [
            machine.start(*command, preloaded=True, cwd=self.folder, env=environment(rank, len(self.machines)))
            for rank, machine in enumerate(self.machines)
        ]
        said = [one.communicate(timeout=600) for one in started]
        return [forge_cli.Ended(one.returncode, out, err) for one, (out, err) in zip(started, said, strict=True)]


def environment(rank: int, world: int) -> dict[str, str]:
    """Of a rank that has a machine to itself."""
    place = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    where = {"MASTER_ADDR": "node-0", "MASTER_PORT": str(nodes.PORT)}
    own = forge_cli.environment(**place, **where)
    return {**own, "PYTHONPATH": f"{own['PYTHONPATH']}:{DIST}"}


def numbers(run: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in line.items() if key not in records.TIMINGS}
        for line in records.read(run / "metrics.jsonl")
    ]


def events(run: Path, name: str) -> list[Mapping[str, Any]]:
    return [event for event in records.read(run / "events.jsonl") if event["event"] == name]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    folder = tmp_path_factory.mktemp("two")
    toys.write_config(folder, "fsdp2", "cables:Cable", "health", **VALUES, **{"health.every": 4, "health.link": 10.0})
    with nodes.machines(2, folder) as machines:
        yield Two(machines, folder)


@pytest.fixture(scope="module")
def undisturbed(two: Two) -> Path:
    """A run on both; the clock of the second is an hour fast, and its cable becomes slow before the check at step 4."""
    two.machines[1].clock = HOUR
    ends = two.train("undisturbed", "-s", f"cable.does={NARROW}", "-s", "cable.at=3", "-s", "run.timeout=60")
    two.machines[1].does("tc qdisc del dev eth0 root")
    two.machines[1].clock = 0.0
    assert [one.code for one in ends] == [0, 0], ends
    return two.folder / "runs" / "undisturbed"


NARROW = "tc qdisc add dev eth0 root tbf rate 20mbit burst 128kb latency 400ms"


@needs_machines
def test_two_machines_train_as_one_process_does(undisturbed: Path, tmp_path: Path) -> None:
    alone = toys.run(tmp_path, steps=STEPS, config=VALUES)
    for ours, theirs in zip(numbers(undisturbed), alone.numbers, strict=True):
        assert ours["tokens"] == theirs["tokens"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    assert not check(found(undisturbed / "checkpoints")[-1].path, contents=True)


@needs_machines
def test_a_slow_link_and_clocks_apart_are_named(undisturbed: Path) -> None:
    """The link in the direction in which it is slow, once it is."""
    told = [(one["step"], one["kind"], one["reason"]) for one in events(undisturbed, "anomaly")]
    assert [(step, reason) for step, kind, reason in told if kind == "clock"] == [
        (step, "3600.0 s between node-0 and node-1") for step in (0, 4)
    ]
    said = re.compile(r"(.+) \(rank \d to \d\): ([\d.]+) MB/s, [\d.]+ × slower than the median of all links")
    slow = [found for step, kind, reason in told if (step, kind) == (4, "link") and (found := said.match(reason))]
    assert min(slow, key=lambda one: float(one[2]))[1] == "node-1 to node-0", told
    assert min(float(one[2]) for one in slow) < 2.6, "20 megabits in a second are 2.5 megabytes"
    times = [one["time"] for one in records.read(undisturbed / "events.jsonl")]
    assert times == sorted(times), "all by the clock of rank 0"


@needs_machines
def test_a_cut_cable_ends_both_and_the_same_command_continues(two: Two, undisturbed: Path) -> None:
    """In bounded time, in words; what follows is the undisturbed run, bit for bit. Rank 0's clock was fast before."""
    two.machines[0].clock = HOUR
    ends = two.train("cut", "-s", "cable.does=ip link set eth0 down", "-s", "cable.at=5")
    two.machines[0].clock = 0.0
    two.machines[1].does("ip link set eth0 up")
    for one in ends:
        said = forge_cli.one_message(one, 1)
        assert re.match(r"Another rank does not answer, in all_reduce: it hangs, or its machine or the network ", said)
        assert "Continue from the newest checkpoint with: forge train --resume runs/cut" in said
    run = two.folder / "runs" / "cut"
    assert not list(run.glob(".lock.*"))
    assert [one.code for one in two.train("cut")] == [0, 0]
    assert numbers(run) == numbers(undisturbed)
    assert [one["step"] for one in events(run, "resumed")] == [4]
    assert [one["outcome"] for one in events(run, "run_finished")] == ["failed", "done"]


@needs_machines
def test_machines_without_a_shared_disk(two: Two) -> None:
    """Nothing is trained, and nothing left on either disk."""
    for one in two.train("far", "--run-dir", two.folder / "disk"):
        assert re.fullmatch(
            r"\S+/disk/far: rank 1 on node-1 does not see what rank 0 on node-0 has there \(1 of 2 ranks do not\)\. "
            r"All nodes must share the file system of the run folder; .*",
            forge_cli.one_message(one, 2),
        )
    assert [list(machine.sees(machine.disk).iterdir()) for machine in two.machines] == [[], []]


@needs_machines
def test_a_run_folder_that_is_shared_and_checkpoints_that_are_not(two: Two) -> None:
    """Told before the first step, and not when half of the first checkpoint is on each disk."""
    checkpoints = two.folder / "runs" / "apart" / "checkpoints"
    checkpoints.mkdir(parents=True)
    two.machines[1].does(f"mount -t tmpfs none '{checkpoints}'")
    for one in two.train("apart"):
        said = forge_cli.one_message(one, 2)
        assert said.startswith("runs/apart/checkpoints: rank 1 on node-1 does not see what rank 0 on node-0 has there")
    assert [list(machine.sees(checkpoints).iterdir()) for machine in two.machines] == [[], []]
