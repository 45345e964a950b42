"""Trains small runs on the pretended device, one after another: child.py WORLDS.json.

A world is `{"cases", "folder", "ranks"}`. Each of its ranks is forked from this process, which has imported all that
they need, and leaves its results in FOLDER/RANK.json and its output in FOLDER/RANK.txt; one world follows the other.

A case is `{"name", "plugins", "config", "steps"}`. Its result: `error`, the notes of steps that are not logged from the
second on, and the loss of each step.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pretended  # before torch

# isort: split
import torch
from torch import Tensor

import standins  # noqa: F401
import warm
from forge_train import BatchPhase, Job, Plugin, PrepareBatch, Update, hookimpl
from forge_train.step.step import Stepper
from forge_train_tools import health
from forge_train_tools.testing import run_forge

LOGGED = 4


def watch() -> None:
    """Label notes with `step` while a step runs that is not logged."""
    real = Stepper.run

    def run(self: Any, progress: Any) -> Any:
        step = progress.step + 1
        pretended.phase = "step" if step > 1 and step % LOGGED else ""
        try:
            return real(self, progress)
        finally:
            pretended.phase = ""

    Stepper.run = run  # type: ignore[method-assign]


class Reads(Plugin):
    """Has the host wait for each step."""

    api = (1, 0)

    @hookimpl
    def on_gradients(self, update: Update) -> None:
        float(update.grad_norm)


class Mixes(Plugin):
    """Adds a tensor of the host to one of the device."""

    api = (1, 0)

    @hookimpl
    def on_gradients(self, update: Update) -> None:
        torch.ones(2) + update.grad_norm.expand(2)


class Moves(Plugin):
    """Makes batches on the device, as one that generates them does."""

    api = (1, 0)

    @hookimpl
    def prepare_batch(self, job: Job) -> PrepareBatch:
        return PrepareBatch(BatchPhase.MAKE, lambda batch: batch.map(Tensor.cuda))


class Dawdles(Plugin):
    """Is late in each step, on rank 1."""

    api = (1, 0)

    @hookimpl
    def on_gradients(self, update: Update) -> None:
        time.sleep(0.5 * int(os.environ["RANK"]))


DOES: dict[str, list[Any]] = {"moves": [Moves], "reads": [Reads], "mixes": [Mixes], "dawdles": [Dawdles]}


def train(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    pretended.take()
    if "port" in case:
        os.environ["MASTER_PORT"] = case["port"]
    torch.compiler.reset()
    seen, beside, more = io.StringIO(), case.get("beside", []), []
    for one in beside:
        more += one.removeprefix("plugins=").split(",") if one.startswith("plugins=") else []
    plugins = [*case["plugins"], *DOES.get(case.get("does", ""), ()), *more]
    settings = {"run.device": "cuda", "log.every": LOGGED, "train.evaluate_every": LOGGED, **case["config"]}
    sets = [one for one in beside if not one.startswith("plugins=")]
    try:
        with contextlib.redirect_stdout(seen):
            done = run_forge(plugins, settings, sets=sets, steps=LOGGED, folder=folder, name=case["name"])
        error, losses = "", [line["loss"] for line in done.metrics if "loss" in line]
        warned = [event["reason"] for event in done.events if event["event"] == "anomaly"]
    except BaseException:
        error, losses, warned = traceback.format_exc(), [], []
    notes = [
        [*key[1:], count]
        for key, count in pretended.take().items()
        if key[0] == "step" and not key[1].startswith("async")
    ]
    return {"error": error, "losses": losses, "notes": notes, "warned": warned}


def check(case: dict[str, Any]) -> dict[str, Any]:
    """What `forge …` says and gives."""
    from forge_train_cli.__main__ import main

    said = io.StringIO()
    sys.argv = ["forge", *case["forge"]]
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        said.write(traceback.format_exc())
        code = 1
    return {"error": said.getvalue() if code else "", "said": said.getvalue(), "losses": [], "notes": []}


def work(cases: list[dict[str, Any]], folder: Path, rank: int) -> None:
    """Be a rank: train its cases."""
    results = {}
    for case in cases:
        results[case["name"]] = check(case) if "forge" in case else train(case, folder)
        (folder / f"{rank}.json").write_text(json.dumps(results), encoding="utf-8")


def forked(cases: list[dict[str, Any]], folder: Path, rank: int, ranks: int) -> int:
    """Start a rank; its process's number."""
    if process := os.fork():
        return process
    code = 1
    try:
        if warm.FORKS:
            ctypes.CDLL(None).prctl(warm.PR_SET_PDEATHSIG, signal.SIGKILL)
        output = os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if ranks > 1:
            world = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank}
            place = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": True}
            os.environ.update({name: str(value) for name, value in {**world, **place}.items()})
            pretended.join()
        work(cases, folder, rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    watch()
    health.SIZES["cuda"] = health.SIZES["cpu"]  # a device's product takes the host ten seconds
    for name in warm.PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    codes = []
    for world in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        folder, ranks = Path(world["folder"]), world["ranks"]
        processes = [forked(world["cases"], folder, rank, ranks) for rank in range(ranks)]
        codes += [os.waitpid(process, 0)[1] for process in processes]
    sys.exit(any(codes))


if __name__ == "__main__":
    main()
