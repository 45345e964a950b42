"""`resources`: parts of a step that add up, ranks that are named, and nothing read between logged steps."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import resource_cases
from forge_train import Plugin, hookimpl
from forge_train_plugins.observers._resources import DeviceTimer, PerRank
from forge_train_tools.testing import Pool, RunForge
from hot_path import Watch, counting, waits

PARTS = ("data", "forward_backward", "optimizer", "other")


class Sleeps(Plugin):
    """Is slow in known places."""

    api = (1, 0)

    @hookimpl
    def prepare_batch(self, job: Any) -> Any:
        from forge_train import BatchPhase, PrepareBatch

        def slow(batch: Any) -> Any:
            time.sleep(0.02)
            return batch

        return PrepareBatch(BatchPhase.MASK, slow)

    @hookimpl
    def on_gradients(self, update: Any) -> None:
        time.sleep(0.03)


def test_parts_add_up_to_the_step(run_forge: RunForge) -> None:
    config = {"log.every": 4, "checkpoint.every": 4, "train.evaluate_every": 4, "train.evaluate_batches": 1}
    run = run_forge(["resources", Sleeps], config, steps=8)
    line = run.metrics[-1]
    parts = {part: line[f"resources.{part}_seconds"] for part in PARTS}
    assert 0.04 <= parts["data"] < 0.2  # two micro-batches
    assert parts["other"] >= 0.03
    assert sum(parts.values()) <= line["step_seconds"]
    assert sum(parts.values()) == pytest.approx(line["step_seconds"], rel=0.3)
    assert line["resources.save_seconds"] > 0  # of the save before
    assert line["resources.host_gib"] > 0.1
    assert {f"resources.{part}_seconds" for part in PARTS} <= {*line["timing"]}
    assert run.numbers == run_forge([Sleeps], config, steps=8, name="without").numbers


def test_it_waits_for_nothing_between_logged_steps(run_forge: RunForge) -> None:
    with counting(4) as found:
        run_forge(["resources", Watch], {"log.every": 4}, steps=12)
    assert waits(found) == {}


class Stream:
    """A device whose work takes a known time, told only to who waits for it."""

    def __init__(self) -> None:
        self.now, self.waited = 0.0, 0

    def event(self) -> Any:
        return Event(self)


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream, self.at = stream, -1.0

    def record(self) -> None:
        self.at = self.stream.now

    def synchronize(self) -> None:
        self.stream.waited += 1

    def elapsed_time(self, end: Any) -> float:
        assert self.stream.waited
        return float(end.at - self.at)


def test_a_device_is_timed_by_events_and_waited_for_once() -> None:
    stream = Stream()
    timer = DeviceTimer(stream.event)
    for _ in range(2):
        with timer.span("step"):
            stream.now += 3
            with timer.span("optimizer"):
                stream.now += 2
    assert stream.waited == 0
    assert timer.take() == [("optimizer", 0.002), ("step", 0.005)] * 2
    assert stream.waited == 1
    assert timer.take() == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_device_seconds_of_a_real_device(run_forge: RunForge) -> None:
    line = run_forge(["resources"], {"run.device": "cuda", "log.every": 2}, steps=4).metrics[-1]
    step, parts = (line[f"resources.{span}_device_seconds"] for span in ("step", "forward_backward"))
    assert 0 < parts < step < 10


def test_the_largest_is_named() -> None:
    one = PerRank(4)
    for rank, total in ((0, 2.0), (2, 9.0), (3, 4.0)):
        one.update(rank, total, 2)
    assert one.value(one.sums, one.maxima) == {"mean": 2.5, "max": 4.5, "rank": 2}


@pytest.mark.slow
@pytest.mark.dist
def test_the_slow_rank_is_named(ranks: Pool, tmp_path: Path) -> None:
    lines = ranks.run(resource_cases.train, 2, folder=str(tmp_path))
    for line in lines:
        assert line["resources.data_seconds.rank"] in (0, 1)
        assert line["resources.other_seconds.rank"] == 1
        assert line["resources.other_seconds.max"] >= 0.05 > line["resources.optimizer_seconds.mean"]
