"""A process that is killed at any operation on a run's checkpoints: what a reader sees then, and what a resume does."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import toys
from forge_cli import forge
from forge_train import ConfigError
from forge_train.base import files
from forge_train.checkpoint import checkpoint, found
from forge_train.checkpoint.seal import ALONE, check
from forge_train.checkpoint.writing import prune, repair
from forge_train.run.records import read
from saving import save_step

pytestmark = [pytest.mark.unit]
OPERATIONS = ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir")


class Killed(BaseException):
    """The process ends here."""


@contextmanager
def killed_at(at: int) -> Iterator[list[int]]:
    """Kill this process at an operation on the disk: from there on, it can do no other."""
    done = [0]
    with pytest.MonkeyPatch.context() as patch:

        def watched(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **more: Any) -> Any:
                done[0] += 1
                if done[0] >= at:
                    raise Killed
                return function(*arguments, **more)

            return call

        for name in OPERATIONS:
            patch.setattr(os, name, watched(getattr(os, name)))
        patch.setattr(files, "_exchange", watched(files._exchange))
        yield done


def every_kill(start: Path, folder: Path, change: Callable[[Path], object]) -> Iterator[Path]:
    """A copy of a run's folder for every operation of a change, killed there; the last one was not killed."""
    for at in range(1, 1000):
        run = folder / str(at)
        shutil.copytree(start, run)
        try:
            with killed_at(at):
                change(run)
        except Killed:
            yield run
            continue
        yield run
        assert at > 5
        return


def write(run: Path, step: int, value: float | None = None) -> None:
    state = {"model": {"w": torch.full((3,), float(step) if value is None else value)}}
    save_step(run / "checkpoints", step, state, ALONE, beside=[])


def value(path: Path) -> float:
    return float(checkpoint.load(path, {}, ALONE)["model"]["w"][0])


@pytest.fixture
def start(tmp_path: Path) -> Path:
    run = tmp_path / "start"
    (run / "checkpoints").mkdir(parents=True)
    for step in (1, 2, 3):
        write(run, step)
    return run


def test_a_roll_back_removes_all_or_nothing_at_every_operation(start: Path, tmp_path: Path) -> None:
    def change(run: Path) -> None:
        found.begin_roll_back(run, 2, [(8, 12)])
        list(found.finish_roll_back(run))

    seen = set()
    for run in every_kill(start, tmp_path, change):
        steps = tuple(one.step for one in checkpoint.found(run / "checkpoints"))
        seen.add(steps)
        assert steps in ((3, 2, 1), (1,))
        assert found.left_out(run) == ([(8, 12)] if steps == (1,) else []), "data goes with what was removed"
        gone = [one.step for one in found.finish_roll_back(run)]
        list(repair(run / "checkpoints", 9, 0))
        assert [one.step for one in checkpoint.found(run / "checkpoints")] == list(steps)
        assert gone in ([], [2], [3, 2])
        write(run, 2, 20.0)  # a new one is not taken for what was rolled back
        list(found.finish_roll_back(run))
        assert value(run / "checkpoints/step-00000002") == 20.0
        assert not [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]
    assert seen == {(3, 2, 1), (1,)}


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_step_that_is_saved_again_is_the_old_or_the_new_one_at_every_operation(
    start: Path, tmp_path: Path, exchanges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanges:
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    seen = []
    for run in every_kill(start, tmp_path, lambda run: write(run, 3, 30.0)):
        if not exchanges:  # where a resume begins
            files.remove_remains(run / "checkpoints")
        assert [one.step for one in checkpoint.found(run / "checkpoints")] == [3, 2, 1]
        seen.append(value(run / "checkpoints/step-00000003"))
        assert check(run / "checkpoints/step-00000003", contents=True) == ""
    assert seen == sorted(seen)
    assert set(seen) == {3.0, 30.0}


def test_a_start_does_what_was_still_to_do_behind_a_save(start: Path, tmp_path: Path) -> None:
    def change(run: Path) -> None:
        write(run, 4)
        list(prune(run / "checkpoints", 2, 0))

    for run in every_kill(start, tmp_path, change):
        there = run / "checkpoints"
        list(repair(there, 2, 0))
        steps = [one.step for one in checkpoint.found(there)]
        assert steps in ([3, 2], [4, 3])
        assert (there / "latest").read_text() == f"step-{steps[0]:08d}\n"
        assert sorted(path.name for path in there.iterdir()) == ["latest", *(f"step-{s:08d}" for s in sorted(steps))]


@pytest.fixture
def stale(tmp_path: Path) -> Path:
    """A finished run, as a kill behind the rename of its last checkpoint leaves it."""
    config = {"checkpoint.every": 1, "checkpoint.keep": 9}
    run = toys.run(tmp_path, name="a", steps=4, config=config).run
    there = run / "checkpoints"
    (there / "latest").write_text("step-00000001\n")
    (there / ".latest.partial").write_text("step-0000")
    (there / ".step-00000000.removed").mkdir()
    return run


@pytest.mark.parametrize("ended", [True, False])
def test_a_resume_of_a_finished_run_repairs_it(stale: Path, tmp_path: Path, ended: bool) -> None:
    if not ended:
        (stale / "outcome.json").unlink()
    with pytest.raises(ConfigError, match="had finished before") if ended else nullcontext():
        toys.run(tmp_path, name="a", steps=4, config={"checkpoint.every": 1, "checkpoint.keep": 2})
    names = sorted(path.name for path in (stale / "checkpoints").iterdir())
    assert names == ["latest", "step-00000003", "step-00000004"]
    assert (stale / "checkpoints/latest").read_text() == "step-00000004\n"
    assert [event["step"] for event in read(stale / "events.jsonl") if event["event"] == "checkpoint_pruned"] == [2, 1]


def test_prune_has_latest_name_what_stays(stale: Path) -> None:
    assert forge("checkpoint", "prune", stale, "--keep", "1").code == 0
    names = sorted(path.name for path in (stale / "checkpoints").iterdir())
    assert names == ["latest", "step-00000004"]
    assert (stale / "checkpoints/latest").read_text() == "step-00000004\n"


def test_prune_removes_a_checkpoint_between_its_two_names(stale: Path) -> None:
    first = stale / "checkpoints" / "step-00000001"
    first.rename(first.with_name(f".{first.name}.replaced"))
    assert forge("checkpoint", "prune", stale, "--keep", "1").code == 0
    assert sorted(path.name for path in first.parent.iterdir()) == ["latest", "step-00000004"]


def test_what_a_kill_leaves_of_a_removal_is_removed_whatever_the_name_before(
    stale: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = stale / "checkpoints" / "step-00000004"
    last.rename(last.with_name(f".{last.name}.replaced"))
    monkeypatch.setattr(shutil, "rmtree", lambda *path, **more: None)
    found.remove(found.found(last.parent)[0])
    monkeypatch.undo()
    files.remove_remains(last.parent)
    assert [path.name for path in last.parent.iterdir() if path.name.startswith(".")] == []


@pytest.mark.slow
def test_a_run_killed_while_it_rolls_back_is_the_uninterrupted_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A roll-back that begins is finished by the resume, wherever the process was killed."""
    asked: list[bool] = []

    def back(control: Any) -> None:
        if not asked:  # a resumed run asks anew
            asked.append(True)
            control.roll_back("a spike", before=3, leave_out=[(12, 16)])

    config = {"checkpoint.every": 1, "checkpoint.keep": 9}

    def run(name: str) -> Any:
        return toys.run(tmp_path, toys.asks(5, back), toys.Noise, name=name, steps=6, config=config)

    wanted = run("whole")
    pruned = [(event["step"], event["path"]) for event in wanted.events if event["event"] == "checkpoint_pruned"]
    assert pruned == [(4, "step-00000004"), (3, "step-00000003")]
    finish = found.finish_roll_back
    for removals in (0, 1, 2):
        asked.clear()
        left = [removals]

        def killed(run: Path, left: list[int] = left) -> Iterator[Any]:
            for gone in finish(run) if left[0] else ():
                left[0] -= 1
                if not left[0]:
                    raise Killed
                yield gone
            raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(found, "finish_roll_back", killed)
            with pytest.raises(Killed):
                run(f"killed-{removals}")
        resumed = run(f"killed-{removals}")
        assert resumed.events[-1]["outcome"] == "done"
        assert resumed.numbers == wanted.numbers
        assert found.left_out(resumed.run) == [(12, 16)]
        assert not (resumed.run / found.ROLL_BACK).exists()


def test_a_reader_finds_a_checkpoint_between_the_two_names_of_a_step_that_is_saved_again(tmp_path: Path) -> None:
    run = toys.run(tmp_path, name="a", steps=2, config={"checkpoint.every": 1}).run
    last = run / "checkpoints" / "step-00000002"
    between = last.rename(last.with_name(f".{last.name}.replaced"))
    assert [saved.path for saved in checkpoint.found(last.parent)] == [between, last.with_name("step-00000001")]
    assert checkpoint.resolve(run) == between
    shutil.copytree(between, last)
    assert checkpoint.resolve(run) == last
