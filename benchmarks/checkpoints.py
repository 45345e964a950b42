"""What a checkpoint costs: the disk, a save that training waits for, and one that is written in the background.

    python benchmarks/checkpoints.py [FOLDER]  # on the disk of that folder; prints the page
    python benchmarks/run.py checkpoints       # on that of temporary files; writes benchmarks/results/checkpoints.md

Each way of saving is measured in a process of its own, so that its peak of
memory is its own. The least of several measurements counts: other work on the machine adds time and never takes any
away. CPU seconds, of all threads, say what wall seconds hide on a machine that is busy with something else.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

MIB = 2**20
PIECE, PIECES = 36 * MIB, 32
"""Bytes of a tensor, and how many there are: 1.125 GiB."""
REPEATS = 2
STEPS, EVERY = 125, 40
MODEL = {
    "decoder.dim": 1024,
    "decoder.layers": 8,
    "decoder.heads": 16,
    "decoder.kv_heads": 16,
    "decoder.head_dim": 64,
    "decoder.hidden": 2816,
    "train.sequence": 16,
    "train.global_batch": 1,
    "train.micro_batch": 1,
    "checkpoint.every": EVERY,
    "checkpoint.keep": 1,
}


def resident() -> int:
    """Bytes of memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak() -> int:
    """The most that it has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Watch:
    """Wall seconds, and CPU seconds of all threads, since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        return time.perf_counter() - self._wall, time.process_time() - self._cpu


def disk(folder: Path, how: str) -> dict[str, float]:
    """MB/s that the disk takes and gives: a file of the size of the state, flushed, dropped from memory and read."""
    from forge_train.store.manifest import hasher

    data = os.urandom(8 * MIB)
    count, written, read, hashed = PIECE * PIECES // len(data), [], [], []
    file = folder / "plain"
    for _ in range(REPEATS):
        watch = Watch()
        with file.open("wb", buffering=0) as out:
            for _ in range(count):
                out.write(data)
            os.fsync(out.fileno())
        written.append(watch.read()[0])
        with file.open("rb", buffering=0) as back:
            os.posix_fadvise(back.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            watch = Watch()
            while back.read(8 * MIB):
                pass
            read.append(watch.read()[0])
        file.unlink()
        watch = Watch()
        hasher().update(memoryview(data))
        hashed.append(watch.read()[1])
    size = count * len(data) / 1e6
    return {"write": size / min(written), "read": size / min(read), "hash": len(data) / 1e6 / min(hashed)}


def save(folder: Path, how: str) -> dict[str, float]:
    """Seconds and memory of a save, once the plan and the buffers are there."""
    from forge_train.checkpoint.seal import ALONE
    from forge_train.checkpoint.writing import commit, stage
    from forge_train.store.save_plan import Copies

    state = {"model": {str(n): torch.full((PIECE // 4,), float(n)) for n in range(PIECES)}}
    spare = [torch.ones_like(tensor) for tensor in state["model"].values()] if how == "copy" else []
    copies: Copies | None = {} if how == "behind" else None
    before, plan = resident(), None
    found: list[dict[str, float]] = []
    for step in range(1, 2 + REPEATS):
        watch = Watch()
        if how == "copy":
            for one, tensor in zip(spare, state["model"].values(), strict=True):
                one.copy_(tensor)
            waits, waits_cpu = wall, cpu = watch.read()
        else:
            staged = stage(folder / f"step-{step:08d}", step, state, ALONE, copies=copies, before=plan)
            plan, (waits, waits_cpu) = staged.shards.plan, watch.read()
            saved = commit(staged, ALONE, beside=[], latest=folder / "latest")
            wall, cpu = watch.read()
            shutil.rmtree(saved.path)
        if how == "at_once":
            waits, waits_cpu = wall, cpu
        found.append({"waits": waits, "waits_cpu": waits_cpu, "whole": wall, "whole_cpu": cpu})
    best = {key: min(one[key] for one in found[1:]) for key in found[0]}
    return {**best, "more": float(peak() - before)}


def train(folder: Path, how: str) -> dict[str, Any]:
    """Seconds between the ends of steps, saves and all, and what the events say of the saves."""
    from forge_train import Plugin, hookimpl
    from forge_train_tools.testing import run_forge

    ends: list[tuple[float, float]] = []

    class Clock(Plugin):
        """Notes when each step ends."""

        @hookimpl
        def on_step(self, step: Any) -> None:
            ends.append((time.perf_counter(), time.thread_time()))

    config = {**MODEL, "checkpoint.asynchronous": how == "behind"}
    run = run_forge([Clock], config, steps=STEPS, folder=folder)
    wall, cpu = ([later[at] - earlier[at] for earlier, later in pairwise(ends)] for at in (0, 1))
    saves = range(2 * EVERY, STEPS, EVERY)  # without the first, which makes the plan and the buffers
    told = {event["step"]: event for event in run.events if event["event"] == "checkpoint_saved"}
    return {
        "bytes": told[EVERY]["bytes"],
        "idle": min(wall[step - 1] for step in range(1, EVERY)),
        "idle_cpu": min(cpu[step - 1] for step in range(1, EVERY)),
        "saving": min(wall[step - 1] for step in saves),
        "saving_cpu": min(cpu[step - 1] for step in saves),
        "waits": min(told[step]["blocked"] for step in saves),
        "whole": min(told[step]["seconds"] for step in saves),
        "peak": float(peak()),
    }


def measured(part: str, how: str, folder: Path) -> dict[str, Any]:
    """A part, in a process of its own."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        command = [sys.executable, __file__, place, part, how]
        ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    print(part, how, {name: round(value, 3) for name, value in found.items()}, flush=True)
    return found


@dataclass(frozen=True)
class Found:
    """What was measured."""

    rates: dict[str, Any]
    copy: dict[str, Any]
    at_once: dict[str, Any]
    behind: dict[str, Any]
    run_once: dict[str, Any]
    run_behind: dict[str, Any]

    @property
    def beyond(self) -> dict[str, float]:
        """What training waits for beside the copy, as a share of a save in the foreground."""
        return {unit: (self.behind[unit] - self.copy[unit]) / self.at_once[unit] for unit in ("waits", "waits_cpu")}

    @property
    def rate(self) -> float:
        """MB/s of a save, as a share of the disk's."""
        return PIECE * PIECES / 1e6 / self.at_once["whole"] / float(self.rates["write"])

    @property
    def factor(self) -> float:
        """A step that saves, without what it waits for, in steps that do not."""
        return float((self.run_behind["saving"] - self.run_behind["waits"]) / self.run_behind["idle"])


def parts(folder: Path) -> Found:
    """Measure."""
    return Found(
        measured("disk", "", folder),
        *(measured("save", how, folder) for how in ("copy", "at_once", "behind")),
        *(measured("train", how, folder) for how in ("at_once", "behind")),
    )


def bars(found: Found) -> list[tuple[str, str, str, bool]]:
    """What was measured, its bar, and whether it is met."""
    more = found.behind["more"] / (PIECE * PIECES)
    return [
        ("training waits beside the copy", f"{found.beyond['waits']:.1%}", "≤ 10%", found.beyond["waits"] <= 0.1),
        ("memory of a background save, in states", f"{more:.2f}", "≤ 1.1", more <= 1.1),
        ("a step that saves, without the copy", f"{found.factor:.2f} ×", "≤ 1.10 ×", found.factor <= 1.1),
        ("a save, of the disk's rate", f"{found.rate:.0%}", "≥ 80%", found.rate >= 0.8),
    ]


def page(found: Found) -> str:
    """The page."""
    rates, copy, at_once, behind = found.rates, found.copy, found.at_once, found.behind
    run_once, run_behind, beyond, size = found.run_once, found.run_behind, found.beyond, PIECE * PIECES
    saves = {"a save that training waits for": at_once, "in the background": behind}
    table = [
        f"| {name} | {one['waits']:.2f} | {one['waits_cpu']:.2f} | {one['whole']:.2f} | {one['whole_cpu']:.2f} "
        f"| {one['more'] / 2**30:.2f} GiB |"
        for name, one in saves.items()
    ]
    runs = {"training waits": run_once, "in the background": run_behind}
    steps = [
        f"| {name} | {one['idle']:.2f} | {one['idle_cpu']:.2f} | {one['saving']:.2f} | {one['saving_cpu']:.2f} "
        f"| {one['waits']:.2f} | {one['whole']:.2f} | {one['peak'] / 2**30:.2f} GiB |"
        for name, one in runs.items()
    ]
    cores, load = os.cpu_count() or 1, os.getloadavg()[2]
    allowed = size / 1e6 / at_once["whole_cpu"] * cores
    return f"""# Checkpoints

Written by `python benchmarks/run.py checkpoints` on {time.strftime("%Y-%m-%d")}, on {cores} cores. In the last
15 minutes, {load:.0f} threads wanted them at a time. The least of {REPEATS} measurements counts.

The disk takes {rates["write"]:.0f} MB/s and gives {rates["read"]:.0f} MB/s (one flushed file of {size / 1e6:.0f} MB).
One core hashes {rates["hash"]:.0f} MB/s.

A state of {size / 2**30:.3f} GiB in {PIECES} tensors, on one process, in seconds; the plan and the buffers are there:

| | training waits | CPU | until it is whole | CPU | more memory |
|---|---|---|---|---|---|
| the copy alone, into memory that is there | {copy["waits"]:.2f} | {copy["waits_cpu"]:.2f} | | | |
{chr(10).join(table)}

Beyond the copy, training waits for {beyond["waits"]:.1%} of a save in the foreground, by CPU time
{beyond["waits_cpu"]:.1%} (bar: 10%). Memory grows by {behind["more"] / size:.2f} of the state (bar: one more copy).

Writing, hashing, flushing, reading back and comparing reach {found.rate:.0%} of the rate at which the disk
takes a plain file (bar: 80%). They take {at_once["whole_cpu"]:.1f} CPU seconds, so all cores together allow
{allowed:.0f} MB/s.

A decoder whose checkpoint has {run_once["bytes"] / 2**30:.2f} GiB, a checkpoint every {EVERY} steps; in seconds, and
CPU seconds of the training thread:

| | a step | CPU | a step that saves | CPU | of which it waits | until it is whole | peak memory |
|---|---|---|---|---|---|---|---|
{chr(10).join(steps)}

In the background, a step that saves takes {found.factor:.2f} × a step that does not, plus the time it waits (bar:
1.10). Hashing and writing share the cores with training here.
"""


def main() -> None:
    folder, part, how = Path(sys.argv[1] if sys.argv[1:] else tempfile.gettempdir()), *([*sys.argv[2:4], "", ""][:2])
    if part:
        found = {
            "disk": lambda: disk(folder, how),
            "save": lambda: save(folder, how),
            "train": lambda: train(folder, how),
        }
        print(json.dumps(found[part]()))
        return
    print(page(parts(folder)))


if __name__ == "__main__":
    main()
