"""Law 3. A run that is killed at any point and resumed repeats the uninterrupted run bit for bit.

`kill -9` at random moments of the real command line in processes of their own: from outside at any time, and from
inside at any operation on the disk, so that the moments inside a checkpoint's saving are met too. `FORGE_TRIALS` is the
number of trials; the seed of each is its number plus `FORGE_SEED`. Without it, CI takes one trial of each kind of run
and of each way to be killed.
"""

from __future__ import annotations

import json
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import toys
from crossed import marked
from forge_cli import DECODER, environment, forge, forge_process, start
from forge_train.checkpoint import checkpoint
from forge_train.mesh.distributed import DistributedContext
from forge_train.mesh.layout import Layout
from forge_train.run.records import TIMINGS, read

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TRIALS = int(os.environ.get("FORGE_TRIALS", "5"))
SEED = int(os.environ.get("FORGE_SEED", "0"))
EXTENDED = () if "FORGE_TRIALS" in os.environ else (0, 3, 4)
STEPS = 24

KILLER = '''
"""Kills this process with SIGKILL at its n-th operation on the run folder, or says at the end how many there were."""
import atexit, os, pathlib, shutil, signal

at, folder, done = int(os.environ["FORGE_KILL_AT"]), os.environ["FORGE_KILL_IN"], [0]
atexit.register(lambda: print(f"operations: {done[0]}", flush=True))

def watched(function):
    def call(*arguments, **more):
        where = arguments[-1] if function is copy else arguments[0]  # a file that is synchronised is only a number
        if isinstance(where, int) or str(where).startswith(folder):
            done[0] += 1
            if done[0] == at:
                os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **more)
    return call

copy = shutil.copyfile
os.fsync = watched(os.fsync)
os.replace = watched(os.replace)
pathlib.Path.replace = watched(pathlib.Path.replace)
pathlib.Path.open = watched(pathlib.Path.open)
shutil.rmtree = watched(shutil.rmtree)
shutil.copyfile = watched(copy)
'''


@dataclass(frozen=True)
class Kind:
    """What is trained: its arguments for `forge train`, how long it takes, and how many operations on its folder."""

    name: str
    arguments: tuple[str, ...]
    run: Path
    seconds: float
    operations: int


def train(folder: Path, arguments: tuple[str, ...], name: str) -> list[object]:
    return ["train", *arguments, "--quiet", "--run-dir", folder, "--name", name]


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> list[Kind]:
    """Two runs that were not interrupted: toys with lion, and forge's own model on text with adamw."""
    folder = tmp_path_factory.mktemp("through")
    common = (
        *("-s", f"train.steps={STEPS}", "-s", "checkpoint.every=3", "-s", "checkpoint.keep_every=9"),
        *("-s", "train.evaluate_every=4", "-s", "log.every=2", "-s", "cosine.warmup=5", "-p", "ema,toys:Noise"),
        *("-s", "checkpoint.keep=2", "--without", "console,tensorboard"),
    )
    toy = toys.write_config(folder, "toys:Average")
    (folder / "text.txt").write_text("\n".join(f"line {n}: {n * n % 97}" for n in range(2000)), encoding="utf-8")
    decoder = folder / "decoder.toml"
    decoder.write_text(f"{DECODER}[text]\npath = {json.dumps(str(folder / 'text.txt'))}\n", encoding="utf-8")
    made = []
    for name, arguments in (
        ("toys", (str(toy), *common, "-p", "lion")),
        ("decoder", (str(decoder), *common)),
    ):
        ended = forge_process(*train(folder, arguments, name), env=killing(folder, 0), timeout=600)
        assert ended.code == 0, ended.err
        operations = int(ended.out.rpartition("operations: ")[2])
        events = list(read(folder / name / "events.jsonl"))
        seconds = events[-1]["time"] - events[0]["time"]
        made.append(Kind(name, arguments, folder / name, seconds, operations))
    return made


def killing(folder: Path, at: int) -> dict[str, str]:
    """The environment of a process that kills itself."""
    (folder / "sitecustomize.py").write_text(KILLER, encoding="utf-8")
    env = environment(FORGE_KILL_AT=str(at), FORGE_KILL_IN=str(folder))
    env["PYTHONPATH"] = f"{folder}{os.pathsep}{env['PYTHONPATH']}"
    return env


def numbers(run: Path) -> list[dict[str, Any]]:
    """Every line of metrics without what differs from run to run."""
    return [
        {key: repr(value) for key, value in line.items() if key not in {*TIMINGS, "timing", *line.get("timing", ())}}
        for line in read(run / "metrics.jsonl")
    ]


def evaluations(run: Path) -> dict[int, tuple[str, str]]:
    """By step; those after the checkpoint that was resumed from are done twice, and must not differ."""
    found: dict[int, tuple[str, str]] = {}
    for event in read(run / "events.jsonl"):
        if event["event"] == "evaluation":
            here = (repr(event["loss"]), repr(event["metrics"]))
            assert found.setdefault(event["step"], here) == here
    return found


def state(run: Path) -> dict[str, Any]:
    """Everything in the last checkpoint."""
    alone = DistributedContext(Layout(), torch.device("cpu"))
    found = checkpoint.newest(run / "checkpoints")
    assert found is not None
    assert found.step == STEPS
    return checkpoint.load(found.path, {}, alone)


def equal(one: Any, other: Any, path: str = "state") -> None:
    assert type(one) is type(other), path
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), path
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            equal(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            equal(a, b, f"{path}.{index}")
    else:
        assert repr(one) == repr(other), path


def whole(run: Path) -> None:
    """Whatever can be seen of checkpoints is whole, at any moment."""
    for saved in checkpoint.found(run / "checkpoints"):
        assert checkpoint.check(saved.path, contents=True) == ""
    latest = run / "checkpoints" / "latest"
    if latest.exists():
        assert checkpoint.check(run / "checkpoints" / latest.read_text(encoding="utf-8").strip()) == ""


def kill_from_outside(kind: Kind, folder: Path, chance: random.Random) -> str:
    process = start(*train(folder, kind.arguments, "run"))
    metrics = folder / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 600
    before = len(metrics.read_bytes()) if metrics.exists() else 0
    while process.poll() is None and not (metrics.exists() and len(metrics.read_bytes()) != before):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    wait = chance.uniform(0, kind.seconds)
    try:
        process.wait(wait)
    except Exception:  # it still runs, as it should
        process.kill()
    process.communicate(timeout=600)
    return f"from outside after {wait:.2f} s: {process.returncode}"


def kill_from_inside(kind: Kind, folder: Path, chance: random.Random) -> str:
    at = chance.randint(1, kind.operations)
    ended = forge_process(*train(folder, kind.arguments, "run"), env=killing(folder, at), timeout=600)
    assert ended.code in (0, -9), ended.err
    return f"from inside at operation {at}: {ended.code}"


@pytest.mark.parametrize("trial", marked(range(TRIALS), EXTENDED))
def test_killed_and_resumed_is_the_uninterrupted_run(kinds: list[Kind], tmp_path: Path, trial: int) -> None:
    chance = random.Random(trial + SEED)
    kind = kinds[trial % 2]
    done = []
    kills = [kill_from_inside, kill_from_outside]
    for kill in [kills[trial // 2 % 2]] if TRIALS <= 5 else chance.sample(kills, 2):
        done.append(kill(kind, tmp_path, chance))
        whole(tmp_path / "run")
    print(kind.name, *done, sep="; ")
    ended = forge(*train(tmp_path, kind.arguments, "run"))  # in this process: another one to go on in
    assert ended.code == 0, (done, ended.err)
    assert numbers(tmp_path / "run") == numbers(kind.run), done
    assert evaluations(tmp_path / "run") == evaluations(kind.run), done
    equal(state(tmp_path / "run"), state(kind.run))
    assert not list((tmp_path / "run" / "checkpoints").glob(".step-*"))


def test_what_is_compared_is_not_little(kinds: list[Kind]) -> None:
    for kind, metrics in zip(kinds, ({"average.distance", "average.seen"}, set()), strict=True):
        lines = numbers(kind.run)
        assert len(lines) == STEPS // 2
        assert lines[0].keys() >= {"step", "tokens", "loss", "grad_norm", "lr", *metrics}
        assert len({line["loss"] for line in lines}) == len(lines)
        assert len(evaluations(kind.run)) == STEPS // 4
        assert {"plugins", "optimizer", "schedule", "data", "random"} <= state(kind.run).keys()
        assert "ema" in state(kind.run)["plugins"]
