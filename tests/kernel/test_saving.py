"""Saving in the background: what is written is what was there when it was asked for, and nothing is lost."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import toys
from forge_train import DivergedError, ForgeError, Plugin, PluginError, hookimpl
from forge_train.base.files import DiskError
from forge_train.checkpoint import writing
from forge_train.checkpoint.checkpoint import check, found, load
from forge_train.checkpoint.seal import ALONE
from forge_train.store import save_plan
from forge_train.store.save_plan import Shards, balanced
from forge_train.store.shards import Shard
from forge_train_kit.background import NICENESS, Background
from full_disk import full_for
from saving import ASYNC, contents, filling, overwritten, save_step, slow_disk, stepping

pytestmark = pytest.mark.unit


def idle(step: int) -> None:
    """Does nothing at a step."""


def saved(run: Path) -> list[tuple[int, str]]:
    return [(one.step, check(one.path, contents=True)) for one in found(run / "checkpoints")]


def test_every_tensor_is_overwritten_and_the_file_holds_the_old_values(tmp_path: Path) -> None:
    config = {"checkpoint.every": 2, "log.every": 4}  # a mean over steps is under way when it saves
    written = threading.Event()
    opens = stepping(lambda step: written.set() if step == 3 else None)
    plugins = (toys.Noise, toys.Average)
    with slow_disk(written) as begun, overwritten(2) as names:
        one = toys.run(tmp_path / "a", *plugins, opens, steps=3, config={**config, **ASYNC}).run
    assert begun == [2, 3]
    assert {"model", "optimizer", "plugins", "random"} <= {name.partition(".")[0] for name in names}
    other = toys.run(tmp_path / "b", *plugins, stepping(idle), steps=3, config=config).run
    second, third = "checkpoints/step-00000002", "checkpoints/step-00000003"
    assert contents(one / second) == contents(other / second)
    assert contents(one / third) != contents(other / third), "it continued with what was overwritten"


def test_a_run_is_resumed_from_what_was_written_in_the_background(tmp_path: Path) -> None:
    config = {"checkpoint.every": 2, "checkpoint.keep": 9, **ASYNC}
    through = toys.run(tmp_path, toys.Noise, toys.Average, name="a", steps=6, config=config)
    assert saved(through.run) == [(6, ""), (4, ""), (2, "")]
    for step in (6, 4):
        shutil.rmtree(through.run / "checkpoints" / f"step-0000000{step}")
    (through.run / "outcome.json").unlink()
    resumed = toys.run(tmp_path, toys.Noise, toys.Average, name="a", steps=6, config=config)
    assert resumed.numbers == through.numbers


def test_training_goes_on_meanwhile_and_the_next_waits_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written, steps = threading.Event(), []

    def at(step: int) -> None:
        steps.append((step, len(found(tmp_path / "run" / "checkpoints"))))
        if step == 4:  # at whose end another is due: it has to wait
            threading.Timer(0.3, written.set).start()

    with slow_disk(written), caplog.at_level(logging.WARNING):
        config = {"checkpoint.every": 2, "checkpoint.keep": 1, **ASYNC}
        run = toys.run(tmp_path, stepping(at), name="run", steps=6, config=config)
    assert steps[:4] == [(1, 0), (2, 0), (3, 0), (4, 0)]
    assert "The checkpoint of step 2 was still being written when that of step 4 was due" in caplog.text
    assert saved(run.run) == [(6, "")]
    told = [event for event in run.events if event["event"].startswith("checkpoint_")]
    assert [(event["event"], event["step"]) for event in told] == [
        *(("checkpoint_saved", 2), ("checkpoint_saved", 4), ("checkpoint_pruned", 2)),
        *(("checkpoint_saved", 6), ("checkpoint_pruned", 4)),
    ]
    first, second, _, last, _ = told
    assert first["seconds"] > 0.3 > first["blocked"]
    assert second["blocked"] > 0.2, "it waited for the one before"
    assert last["seconds"] == last["blocked"], "nothing goes on after the last"


def test_plugins_are_told_once_it_is_whole_and_in_the_order_of_checkpoints(tmp_path: Path) -> None:
    class Looks(Plugin):
        @hookimpl
        def on_start(self, job: Any) -> None:
            self.seen: list[tuple[str, int, bool]] = []

        @hookimpl
        def on_checkpoint(self, event: Any) -> None:
            self.seen.append((event.kind, event.step, event.kind == "saving" or not check(event.path, contents=True)))

        @hookimpl
        def on_step(self, step: Any) -> None: ...

    run = toys.run(tmp_path, Looks, steps=3, config={"checkpoint.every": 1, "checkpoint.keep": 9, **ASYNC})
    kinds = [one for step in (1, 2, 3) for one in (("saving", step, True), ("saved", step, True))]
    assert run.plugin("looks").seen == kinds


@pytest.mark.parametrize("at", ["seal", "_publish", "write"])
def test_a_disk_that_refuses_ends_the_run_at_a_later_step_with_the_usual_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    fills = filling(monkeypatch, 4, Shards if at == "write" else writing, at)
    config = {"checkpoint.every": 2, "checkpoint.keep": 1, **ASYNC}
    with pytest.raises(DiskError, match=r"step-00000004: can't save .* newest whole checkpoint is step-00000002\."):
        toys.run(tmp_path, fills, name="run", steps=99, config=config)
    run = tmp_path / "run"
    assert saved(run) == [(2, "")]
    outcome = json.loads((run / "outcome.json").read_text(encoding="utf-8"))
    assert (outcome["outcome"], outcome["error"]["phase"], outcome["code"]) == ("failed", "save", 1)
    assert 4 <= outcome["step"] <= 6
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["latest", "step-00000002"]
    monkeypatch.undo()
    assert toys.run(tmp_path, name="run", steps=99, config={"checkpoint.every": 50}).finished.outcome == "done"


def test_a_failure_waits_for_the_writer_and_says_what_it_managed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written = threading.Event()

    def at(step: int) -> None:
        if step == 3:
            threading.Timer(0.2, written.set).start()
            raise LookupError("no more")

    with slow_disk(written), pytest.raises(LookupError), caplog.at_level(logging.INFO):
        toys.run(tmp_path, stepping(at), name="run", config={"checkpoint.every": 2, **ASYNC})
    run = tmp_path / "run"
    assert saved(run) == [(2, "")]
    assert "The checkpoint of step 2, which was being written, is whole." in caplog.text
    events = [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert events == ["run_started", "checkpoint_saved", "run_finished"]


def test_a_failure_also_says_what_the_writer_did_not_manage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **more: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    def at(step: int) -> None:
        if step == 3:
            written.set()
            raise LookupError("no more")

    written = threading.Event()
    monkeypatch.setattr(writing, "seal", refuse)
    with slow_disk(written), pytest.raises(LookupError):
        toys.run(tmp_path, stepping(at), name="run", config={"checkpoint.every": 2, **ASYNC})
    assert "The checkpoint of step 2 was not written: " in caplog.text
    assert "Input/output error" in caplog.text
    assert saved(tmp_path / "run") == []


def test_a_run_that_is_told_to_stop_has_its_last_step_on_disk(tmp_path: Path) -> None:
    config = {"checkpoint.every": 2, "checkpoint.keep": 9, **ASYNC}
    stopped = toys.run(tmp_path, name="run", steps=9, stop_at=5, config=config)
    assert (stopped.finished.outcome, stopped.finished.step) == ("interrupted", 5)
    assert saved(stopped.run) == [(5, ""), (4, ""), (2, "")]
    assert [event["event"] for event in stopped.events][-3:] == ["checkpoint_saved", "interrupted", "run_finished"]


def test_a_run_that_diverges_names_the_checkpoint_that_was_being_written(tmp_path: Path) -> None:
    class Diverges(Plugin):
        @hookimpl
        def on_gradients(self, update: Any) -> None:
            if update.step == 3:
                update.scale(float("nan"))

    written = threading.Event()
    threading.Timer(0.5, written.set).start()
    with slow_disk(written), pytest.raises(DivergedError, match=r"step-00000002, from before it, is whole"):
        toys.run(tmp_path, Diverges, name="run", config={"checkpoint.every": 2, **ASYNC})


def test_a_roll_back_takes_what_was_being_written(tmp_path: Path) -> None:
    class Back(Plugin):
        @hookimpl
        def on_start(self, job: Any) -> None:
            self.job, self.asked = job, False

        @hookimpl
        def on_step(self, step: Any) -> None:
            if step.step == 3 and not self.asked:
                self.asked = True
                threading.Timer(0.2, written.set).start()
                self.job.control.roll_back("again")

    written = threading.Event()
    with slow_disk(written):
        run = toys.run(tmp_path, Back, name="run", config={"checkpoint.every": 2, **ASYNC})
    assert [event["checkpoint"][-1] for event in run.events if event["event"] == "resumed"] == ["2"]
    assert run.finished.outcome == "done"


# -- room -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, ASYNC])
def test_a_checkpoint_that_has_no_room_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: Mapping[str, Any]
) -> None:
    real = shutil.disk_usage

    def at(step: int) -> None:
        if step == 3:
            monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=5000))

    written = threading.Event()
    written.set()
    with pytest.raises(ForgeError) as caught, slow_disk(written) as begun:
        toys.run(tmp_path, stepping(at), name="run", config={"checkpoint.every": 2, **more})
    message = str(caught.value)
    assert "step-00000004: can't save the checkpoint: it takes " in message
    assert "has 4.88 KiB of " in message
    assert "The newest whole checkpoint is step-00000002. Make room there, then go on." in message
    assert begun == [2]


def test_the_size_that_is_checked_is_what_the_tensors_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(writing, "_check_room", lambda target, size: sizes.append(size))
    run = toys.run(tmp_path, steps=1).run
    (one,) = found(run / "checkpoints")
    tensors = sum(file.stat().st_size for file in one.path.glob("rank-*.safetensors"))
    assert tensors <= sizes[0] <= 1.5 * tensors


# -- shares -----------------------------------------------------------------------------------------------------------


def held(*shards: tuple[str, int, int]) -> list[Shard]:
    """A rank's shards: names, offsets and numbers of values of 1 byte."""
    return [Shard(name, ((offset, offset + size),), (10**9,), torch.uint8) for name, offset, size in shards]


def written(everybody: list[list[Shard]]) -> list[list[tuple[str, int]]]:
    return [[(shard.name, shard.box[0][0]) for shard in shards] for shards in everybody]


def test_each_shard_is_written_once_and_all_ranks_write_about_as_much() -> None:
    million = 10**6
    replicated = [("small", 0, 1), ("large", 0, 4 * million), ("middle", 0, 3 * million)]
    first = held(*replicated, ("own", 0, 5 * million))
    second = held(*replicated, ("own", 5 * million, 2 * million))
    assert written(balanced([first, second])) == [
        [("middle", 0), ("own", 0)],
        [("small", 0), ("large", 0), ("own", 5 * million)],
    ]


def test_replicas_of_shards_write_half_each() -> None:
    """Two replicas, each of two shards."""
    shards = [[(f"p{n}", half * 10**6, 10**6) for n in range(8)] for half in (0, 1)]
    plans = balanced([held(*shards[rank % 2]) for rank in range(4)])
    assert [len(one) for one in plans] == [4, 4, 4, 4]
    everything = [one for rank in written(plans) for one in rank]
    assert sorted(everything) == sorted((name, offset) for half in shards for name, offset, _ in half)


def test_a_large_state_is_written_by_several_threads_whose_refusals_are_all_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_plan, "PER_THREAD", 1000)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(3), raising=False)
    state = {"model": {f"p{n}": torch.full((500,), float(n)) for n in range(8)}}
    path = save_step(tmp_path, 1, state, ALONE, beside=[]).path
    names = [f"rank-00000-{thread}.safetensors" for thread in range(3)]
    assert sorted(file.name for file in path.glob("rank-*.safetensors")) == names
    assert check(path, contents=True) == ""
    assert all(value.eq(int(name[1:])).all() for name, value in load(path, {}, ALONE)["model"].items())
    for name in names:
        with full_for(name), pytest.raises(DiskError, match="No space left on device"):
            save_step(tmp_path, 2, state, ALONE, beside=[])
    assert [one.step for one in found(tmp_path)] == [1]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, threads have no niceness of their own")
def test_training_goes_first(tmp_path: Path) -> None:
    """Where there are fewer cores than threads, writing takes what training leaves."""

    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = niceness()
    assert Background(niceness, ALONE).result() == max(before, NICENESS)
    assert niceness() == before


@pytest.mark.parametrize(
    ("everybody", "problem"),
    [
        ([held(("w", 0, 10**9)), held(("w", 0, 5))], "shards that do not add up to the tensor"),
        ([held(("w", 0, 10)), held(("w", 12, 10**9 - 12))], "shards that do not add up to the tensor"),
        ([held(("w", 0, 10)), held(("w", 5, 10**9 - 10))], "shards that overlap"),
    ],
)
def test_shards_that_are_not_the_tensor_are_not_saved(everybody: list[list[Shard]], problem: str) -> None:
    with pytest.raises(PluginError, match=f"The state 'w' can't be saved: the ranks hold {problem}"):
        save_plan._check_tiled({"w": ((10**9,), torch.uint8)}, everybody)
