"""What is known of a failure: its type by meaning, and rank, phase, plugin, hook and key."""

from __future__ import annotations

import errno
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import toys
from forge_cli import forge
from forge_train import (
    BatchPhase,
    ConfigError,
    DivergedError,
    Failure,
    ForgeError,
    Plugin,
    PluginError,
    PrepareBatch,
    hookimpl,
)
from forge_train.base.errors import Where, locate
from forge_train.run import records
from forge_train.run.run import Run
from forge_train.store import tensors
from forge_train.store.save_plan import Shards
from forge_train_tools.launching.launch import WorkerResult

pytestmark = [pytest.mark.unit]


class BrokenShardError(ForgeError):
    """A plugin's own failure, with a type that it chose."""

    type = "data"


def failing(error: Exception, hook: str) -> type[Plugin]:
    """A plugin `bad` that fails in one hook, after the first checkpoint where there are steps."""

    def on_start(self: Any, job: Any) -> None:
        raise error

    def on_gradients(self: Any, update: Any) -> None:
        if update.step == 2:
            raise error

    def on_step(self: Any, step: Any) -> None:
        if step.step == 2:
            raise error

    def prepare_batch(self: Any, job: Any) -> PrepareBatch:
        def prepare(batch: Any) -> Any:
            raise error

        return PrepareBatch(BatchPhase.MASK, prepare)

    def optimizer(self: Any, model: Any, job: Any) -> Any:
        raise error

    def quiet(self: Any, step: Any) -> None: ...

    members: dict[str, Any] = {hook: hookimpl(locals()[hook])}
    return type("Bad", (Plugin,), {"on_step": hookimpl(quiet), **members})  # more than an observer


@pytest.mark.parametrize(
    ("error", "hook", "expected"),
    [
        (LookupError("x"), "on_step", ("plugin", "loop", "bad", "on_step")),
        (LookupError("x"), "on_gradients", ("plugin", "step", "bad", "on_gradients")),
        (LookupError("x"), "on_start", ("plugin", "start", "bad", "on_start")),
        (LookupError("x"), "optimizer", ("plugin", "build", "bad", "optimizer")),
        (OSError(errno.EIO, "x"), "prepare_batch", ("data", "data", "bad", "prepare_batch")),
        (BrokenShardError("x"), "on_step", ("data", "loop", "bad", "on_step")),
        (ForgeError("x"), "on_step", ("plugin", "loop", "bad", "on_step")),
        (DivergedError("x"), "on_step", ("diverged", "loop", "bad", "on_step")),
        (ConfigError("x"), "on_step", ("configuration", "loop", "bad", "on_step")),
        (torch.OutOfMemoryError("x"), "on_step", ("memory", "loop", "bad", "on_step")),
        (RuntimeError("[gloo] Connection closed by peer"), "on_step", ("communication", "loop", "bad", "on_step")),
    ],
)
def test_a_failure_in_a_run(tmp_path: Path, error: Exception, hook: str, expected: tuple[str, ...]) -> None:
    without = ["adamw"] if hook == "optimizer" else []
    with pytest.raises(Exception):  # noqa: B017, PT011  # what it says is compared below
        toys.run(tmp_path, failing(error, hook), name="a", without=without, config={"checkpoint.every": 1})
    outcome = Run(tmp_path / "a").outcome()
    found = outcome["error"]
    assert (found["type"], found["phase"], found["plugin"], found["hook"]) == expected
    assert (found["rank"], found["key"]) == (0, "")
    assert "x" in found["message"] or "losed" in found["message"] or "Out of memory" in found["message"]
    *_, last = records.read(tmp_path / "a" / "events.jsonl")
    assert (last["event"], last["version"], last["error"]) == ("run_finished", 2, found)


class Breaks:
    """Fails when it is called."""

    def __call__(self, *arguments: Any) -> Any:
        raise LookupError("x")

    loss = outputs = train = evaluate = __call__

    def weight(self, batch: Any) -> int:
        return 1


class Breaking(toys.ToyLoader):
    def __next__(self) -> Any:
        raise LookupError("x")


class Wrong(Breaks):
    """Gives something else than a loss."""

    def __call__(self, *arguments: Any) -> Any:
        return "x"

    loss = __call__


def giving(hook: str, *arguments: str, gives: Any, beside: str = "") -> type[Plugin]:
    """A plugin `bad` whose hook gives something; with `beside` it has another one."""
    names = {"self": None} | dict.fromkeys(arguments)
    code = f"def {hook}({', '.join(names)}): return gives(job)"
    space: dict[str, Any] = {"gives": gives}
    exec(code, space)
    members = {hook: hookimpl(space[hook])}
    if beside:
        members[beside] = hookimpl(lambda self, step: None)
    return type("Bad", (Plugin,), {**members, "__module__": __name__})


@pytest.mark.parametrize(
    ("plugin", "replaced", "phase", "hook", "called"),
    [
        (giving("task", "job", gives=lambda job: Breaks()), "next_token", "forward", "task", "Breaks.__call__"),
        (giving("loss", "job", gives=lambda job: Breaks()), "cross_entropy", "forward", "loss", "Breaks.__call__"),
        (
            giving("executor", "model", "task", "job", gives=lambda job: Breaks()),
            *("sequential", "forward", "executor", "Breaks.__call__"),
        ),
        (
            giving("build_data", "split", "job", gives=lambda job: Breaking(job, False, 0), beside="on_step"),
            *("toy_data", "data", "build_data", "Breaking.__next__"),
        ),
    ],
)
def test_what_a_hook_gave_is_blamed_with_the_hook(
    tmp_path: Path, plugin: type[Plugin], replaced: str, phase: str, hook: str, called: str
) -> None:
    """Nobody asks the hook again; the innermost plugin's code counts, and not that of who calls it."""
    with pytest.raises(LookupError) as caught:
        toys.run(tmp_path, plugin, name="a", without=[replaced])
    assert caught.value.__notes__ == [f"in plugin 'bad' (under-test 0), hook {hook} ({called})"]
    found = Run(tmp_path / "a").outcome()["error"]
    assert (found["type"], found["phase"]) == ("data" if phase == "data" else "plugin", phase)
    assert (found["plugin"], found["hook"]) == ("bad", hook)


def test_a_wrong_result_is_blamed_on_the_hook_that_gave_the_function(tmp_path: Path) -> None:
    """And not on the executor, which called it."""
    plugin = giving("loss", "job", gives=lambda job: Wrong())
    with pytest.raises(PluginError, match=r"hook loss .* must return"):
        toys.run(tmp_path, plugin, name="a", without=["cross_entropy"])
    found = Run(tmp_path / "a").outcome()["error"]
    assert (found["type"], found["plugin"], found["hook"]) == ("plugin", "bad", "loss")


def test_a_checkpoint_that_can_t_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **more: Any) -> None:
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(Shards, "write", refuse)
    with pytest.raises(ForgeError):
        toys.run(tmp_path, name="a", config={"checkpoint.every": 2})
    error = Run(tmp_path / "a").outcome()["error"]
    assert (error["type"], error["phase"], error["plugin"]) == ("checkpoint", "save", "")


def test_a_checkpoint_that_can_t_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **more: Any) -> None:
        raise OSError(errno.EIO, "no")

    toys.run(tmp_path, name="a", stop_at=2)
    monkeypatch.setattr(tensors, "read", refuse)
    with pytest.raises(OSError, match="no"):
        toys.run(tmp_path, name="a")
    error = Run(tmp_path / "a").outcome()["error"]
    assert (error["type"], error["phase"]) == ("checkpoint", "load")


def test_a_run_that_ends_well_has_no_error(tmp_path: Path) -> None:
    run = toys.run(tmp_path, name="a")
    assert Run(run.run).outcome()["error"] is None
    assert run.events[-1]["error"] is None


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["-s", "train.clip_norm=x"], "train.clip_norm"),
        (["-s", "adamw.lr=-1"], "adamw.lr"),
        (["-s", "train.global_batch=3"], "train.global_batch"),
        (["-s", "parallel.tp=3"], "parallel.tp"),
        (["--name", ".x"], "run.name"),
    ],
)
def test_a_mistake_names_its_key(tmp_path: Path, arguments: list[str], key: str) -> None:
    ended = forge("train", toys.write_config(tmp_path), "--json", "--run-dir", tmp_path / "runs", *arguments)
    error = ended.json["error"]
    assert (ended.code, error["type"], error["phase"], error["key"]) == (2, "configuration", "configure", key)
    assert key in error["message"]


def test_fields_survive_the_way_between_processes() -> None:
    error = ConfigError("x", key="a.b")
    locate(error, plugin="p", key="other")
    assert error.where == Where("p", "", "a.b"), "what is known already stays"
    assert pickle.loads(pickle.dumps(error)).where == error.where


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (WorkerResult(1, 1, "killed", "was killed by SIGKILL."), ("internal", "Rank 1 was killed by SIGKILL.", 1)),
        (WorkerResult(2, 1, "hung", "hangs."), ("communication", "Rank 2 hangs.", 2)),
        (
            WorkerResult(3, 1, failure=json.loads(json.dumps(Failure("data", "x", 3).as_json()))),
            ("data", "x", 3),
        ),
    ],
)
def test_what_the_launcher_knows_of_a_rank(outcome: WorkerResult, expected: tuple[str, str, int]) -> None:
    failure = outcome.as_failure()
    assert (failure.type, failure.message, failure.rank) == expected


def test_the_rank_that_failed_first_replaces_what_rank_0_saw(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.metrics({"step": 1, "loss": 2.0})
    run.fail(Failure("internal", "of another day"), 1, 0, None)
    began = list(records.read(tmp_path / "events.jsonl"))[-1]["time"] + 1e-6
    first = Failure("plugin", "what went wrong\nmore", 1, "loop", "bad", "on_step")
    for seen in (Failure("communication", "lost"), None):
        if seen:
            run.fail(seen, 1, 1, 2.0)
        run.fail_again(first, 1, 1, since=began)
        old, new = records.read(tmp_path / "events.jsonl")
        assert old["reason"] == "of another day"
        assert (new["reason"], new["error"], new["loss"]) == ("what went wrong", first.as_json(), 2.0)
        assert run.outcome() == {"outcome": "failed", "step": 1, "loss": 2.0, "code": 1, "error": first.as_json()}
