"""Law 10. Nothing is lost: a checkpoint is whole or invisible, verified before it replaces another, and a failing
logger costs no step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import toys
from crossed import few
from forge_cli import environment
from forge_train import Evaluation, ForgeError, Plugin, hookimpl
from forge_train.checkpoint import writing
from forge_train.checkpoint.checkpoint import check, found

DRIVER = '''
"""Saves a third checkpoint and prunes the first, in a child for every operation on the disk, each killed at its own."""
import json, os, pathlib, shutil, signal, sys

import torch

from forge_train.checkpoint import checkpoint
from forge_train_kit.background import Background
from forge_train.base.files import remove_remains
from forge_train.checkpoint.writing import commit, stage
from forge_train.mesh.distributed import DistributedContext
from forge_train.config.rules import Layout
from forge_train_kit.full_tensors import files_of

folder, behind, form = pathlib.Path(sys.argv[1]), sys.argv[2] == "behind", sys.argv[3]
alone = DistributedContext(Layout(), torch.device("cpu"))

def write(place, step):
    state = {"model": {"w": torch.full((4, 3), float(step)), "v": torch.full((2,), float(step))}, "step": step}
    remove_remains(place)
    staged = stage(place / f"step-{step:08d}", step, state, alone, copies={} if behind else None, files=files_of(form))
    for tensor in state["model"].values() if behind else ():
        tensor.zero_()
    commit(staged, alone, beside=[], latest=place / "latest")

class Watched:
    """A file, of which every write counts."""
    def __init__(self, file, watched):
        self.file, self.write = file, watched(file.write)
    def __getattr__(self, name):
        return getattr(self.file, name)
    def __enter__(self):
        return self
    def __exit__(self, *error):
        self.file.close()

def save(place, at):
    left = [at]
    def watched(function):
        def call(*arguments, **more):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **more)
        return call
    os.fsync, os.rename, os.unlink, os.rmdir = map(watched, (os.fsync, os.rename, os.unlink, os.rmdir))
    os.mkdir, os.replace, os.pwrite = map(watched, (os.mkdir, os.replace, os.pwrite))
    opened = watched(pathlib.Path.open)
    def open_watched(path, mode="r", *arguments, **more):
        file = opened(path, mode, *arguments, **more)
        return Watched(file, watched) if "w" in mode else file
    pathlib.Path.replace, pathlib.Path.open = watched(pathlib.Path.replace), open_watched
    def both():
        write(place, 3)
        list(checkpoint.prune(place, 2, 0))
    Background(both, alone).result() if behind else both()

start = folder / "start"
start.mkdir()
write(start, 1)
write(start, 2)
results, at = [], 0
while True:
    at += 1
    place = folder / str(at)
    shutil.copytree(start, place)
    child = os.fork()
    if child == 0:
        save(place, at)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    steps, wrong = [], []
    for saved in checkpoint.found(place):
        steps.append(saved.step)
        wrong.append(checkpoint.check(saved.path, contents=True))
        value = checkpoint.load(saved.path, {}, alone)["model"]["w"]
        if not value.eq(float(saved.step)).all():
            wrong.append("holds another step")
    latest = (place / "latest").read_text().strip()
    wrong.append(checkpoint.check(place / latest))
    write(place, 4)
    left = [path.name for path in place.iterdir() if path.name.startswith(".step")]
    results.append({"steps": steps, "wrong": [text for text in wrong if text], "latest": latest, "left": left})
    if os.WIFEXITED(status):
        break
print(json.dumps(results))
'''


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize(
    ("where", "form"),
    few(
        [("at_once", "sharded"), ("behind", "sharded"), ("behind", "both")],
        [("at_once", "sharded"), ("behind", "sharded")],
    ),
)
def test_killed_at_any_operation_inside_save_or_prune(tmp_path: Path, where: str, form: str) -> None:
    command = [sys.executable, "-c", DRIVER, str(tmp_path), where, form]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    assert ended.returncode == 0, ended.stderr
    results = json.loads(ended.stdout.splitlines()[-1])
    assert len(results) > 40  # so many operations there are
    for result in results:
        assert result["wrong"] == []
        assert result["left"] == []
        assert result["steps"] in ([2, 1], [3, 2, 1], [3, 2])
        assert result["latest"] in ("step-00000002", "step-00000003")
    assert results[0]["steps"] == [2, 1]
    assert results[-1]["steps"] == [3, 2]
    assert [list(steps) for steps in dict.fromkeys(tuple(r["steps"]) for r in results) if steps[0] == 3] == [
        [3, 2, 1],
        [3, 2],
    ]


@pytest.mark.unit
def test_what_was_saved_is_read_back_before_anything_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk writes something else than it was given: the run ends, and nothing that was whole is gone."""
    real = writing.seal
    saves = []

    def rots(path: Path, *arguments: Any, **more: Any) -> int:
        size = real(path, *arguments, **more)
        saves.append(path)
        if len(saves) == 3:
            data = next(path.glob("rank-*.safetensors"))
            content = bytearray(data.read_bytes())
            content[-200] ^= 1
            data.write_bytes(content)
        return size

    monkeypatch.setattr(writing, "seal", rots)
    with pytest.raises(ForgeError, match="what was saved can't be read back"):
        toys.run(tmp_path, name="a", steps=6, config={"checkpoint.every": 1, "checkpoint.keep": 1})
    (kept,) = found(tmp_path / "a" / "checkpoints")
    assert kept.step == 2
    assert check(kept.path, contents=True) == ""
    monkeypatch.undo()
    assert toys.run(tmp_path, name="a", steps=6).finished.outcome == "done"


@pytest.mark.unit
def test_pruning_waits_for_the_new_checkpoint(tmp_path: Path) -> None:
    class Looks(Plugin):
        """Writes down what is there at every moment it is told of."""

        @hookimpl
        def on_start(self, job: Any) -> None:
            self.folder, self.seen = job.run.checkpoints, []

        @hookimpl
        def on_checkpoint(self, event: Any) -> None:
            self.seen.append((event.kind, [saved.step for saved in found(self.folder)]))

        @hookimpl
        def on_step(self, step: Any) -> None: ...

    run = toys.run(tmp_path, Looks, steps=3, config={"checkpoint.every": 1, "checkpoint.keep": 1})
    assert run.plugin("looks").seen == [
        *(("saving", []), ("saved", [1])),
        *(("saving", [1]), ("saved", [2, 1]), ("pruned", [2])),
        *(("saving", [2]), ("saved", [3, 2]), ("pruned", [3])),
    ]


@pytest.mark.unit
def test_a_failing_logger_costs_no_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    failures: list[str] = []

    def failing(hook: str) -> type[Plugin]:
        def fail(self: Any, **arguments: Any) -> None:
            failures.append(hook)
            raise OSError(f"{hook} failed")

        parameters = {
            "on_log": "record",
            "on_checkpoint": "event",
            "on_end": "finished",
        }
        space: dict[str, Any] = {"fail": fail}
        exec(f"def {hook}(self, {parameters[hook]}): fail(self)", space)  # arguments are given by name
        return type(f"Bad{hook.title().replace('_', '')}", (Plugin,), {hook: hookimpl(space[hook])})

    class BadEvaluation(Plugin):
        @hookimpl
        def on_log(self, record: Any) -> None:
            if isinstance(record, Evaluation):
                failures.append("evaluation")
                raise OSError("evaluation failed")

    plugins = [*(failing(hook) for hook in ("on_log", "on_checkpoint", "on_end")), BadEvaluation]
    config = {"train.evaluate_every": 2, "checkpoint.every": 2}
    run = toys.run(tmp_path, *plugins, toys.Noise, config=config, name="a")
    assert run.finished.outcome == "done"
    assert run.numbers == toys.run(tmp_path, toys.Noise, config=config, name="b").numbers
    assert sorted(failures) == ["evaluation", "on_checkpoint", "on_end", "on_log"]  # each once
    assert caplog.text.count("is left out from here on") == 4
    assert [saved.step for saved in found(run.run / "checkpoints")] == [4, 2]


@pytest.mark.unit
def test_any_other_plugin_that_fails_stops_the_run_with_the_last_checkpoint_whole(tmp_path: Path) -> None:
    class Bad(Plugin):
        @hookimpl
        def on_step(self, step: Any) -> None:
            if step.step == 3:
                raise LookupError("no more")

    with pytest.raises(LookupError, match="no more") as caught:
        toys.run(tmp_path, Bad, name="a", config={"checkpoint.every": 2})
    assert caught.value.__notes__ == ["in plugin 'bad' (under-test 0), hook on_step"]
    (kept,) = found(tmp_path / "a" / "checkpoints")
    assert (kept.step, check(kept.path, contents=True)) == (2, "")
