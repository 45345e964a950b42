"""What a checkpoint costs: the disk, a save that training waits for, and one that is written in the background.

    python benchmarks/checkpoints.py [FOLDER]   # writes benchmarks/results/checkpoints.md

FOLDER lies on the disk that is measured. Each way of saving is measured in a process of its own, so that its peak of
memory is its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results" / "checkpoints.md"
MIB = 2**20
PIECE, PIECES = 36 * MIB, 32
"""Bytes of a tensor, and how many there are: 1.125 GiB."""
STEPS, EVERY = 13, 4
MODEL = {
    "decoder.dim": 1024,
    "decoder.layers": 8,
    "decoder.heads": 16,
    "train.sequence": 64,
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


def disk(folder: Path) -> dict[str, float]:
    """MB/s that the disk takes and gives: one file of the size of the state, flushed, dropped from memory and read."""
    data = os.urandom(8 * MIB)
    count, written, read = PIECE * PIECES // len(data), [], []
    file = folder / "plain"
    for _ in range(3):
        began = time.perf_counter()
        with file.open("wb", buffering=0) as out:
            for _ in range(count):
                out.write(data)
            os.fsync(out.fileno())
        written.append(time.perf_counter() - began)
        with file.open("rb", buffering=0) as back:
            os.posix_fadvise(back.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            while back.read(8 * MIB):
                pass
            read.append(time.perf_counter() - began)
        file.unlink()
    began = time.perf_counter()
    for _ in range(16):
        hashlib.sha256(data).digest()
    hashing = time.perf_counter() - began
    size = count * len(data) / 1e6
    return {
        "write": size / median(written),
        "read": size / median(read),
        "hash": 16 * len(data) / 1e6 / hashing,
    }


def save(folder: Path, how: str) -> dict[str, float]:
    """Seconds and memory of the third save of a state; the first two make the plan and the buffers."""
    from forge_train.storage.seal import ALONE
    from forge_train.storage.writing import Copies, commit, stage_in

    torch.manual_seed(0)
    state = {"model": {str(n): torch.randn(PIECE // 4) for n in range(PIECES)}}
    spare = [torch.empty_like(tensor) for tensor in state["model"].values()] if how == "copy" else []
    before, copies, plan, found = resident(), Copies() if how == "behind" else None, None, {}
    for step in range(1, 4):
        began = time.perf_counter()
        if how == "copy":
            for one, tensor in zip(spare, state["model"].values(), strict=True):
                one.copy_(tensor)
            found = {"blocked": time.perf_counter() - began}
            continue
        staged = stage_in(folder, step, state, ALONE, copies=copies, before=plan)
        plan, blocked = staged.shards.plan, time.perf_counter() - began
        saved = commit(staged, ALONE, beside=[], latest=folder / "latest")
        seconds = time.perf_counter() - began
        found = {
            "blocked": blocked if how == "behind" else seconds,
            "seconds": seconds,
            "rate": saved.bytes / 1e6 / (seconds - (blocked if how == "behind" else 0)),
        }
        shutil.rmtree(saved.path)
    return {**found, "more": float(peak() - before)}


def train(folder: Path, how: str) -> dict[str, Any]:
    """Seconds between the ends of steps, saves and all, and what the events say."""
    from forge_train import Plugin, hookimpl
    from forge_train.testing import run_forge

    ends: list[float] = []

    class Clock(Plugin):
        """Notes when each step ends."""

        @hookimpl
        def on_step(self, step: Any) -> None:
            ends.append(time.perf_counter())

    config = {**MODEL, "checkpoint.asynchronous": how == "behind"}
    run = run_forge([Clock], config, steps=STEPS, folder=folder)
    between = [later - earlier for earlier, later in pairwise(ends)]
    saving = [between[step - 1] for step in range(EVERY, STEPS, EVERY)]
    saved = [event for event in run.events if event["event"] == "checkpoint_saved"][: len(saving)]
    told = {event["step"]: event for event in saved}
    idle = [seconds for step, seconds in enumerate(between, 1) if step % EVERY == EVERY - 2]
    return {
        "bytes": saved[0]["bytes"],
        "idle": median(idle),
        "saving": median(saving[1:]),
        "blocked": median(told[step]["blocked"] for step in list(told)[1:]),
        "seconds": median(told[step]["seconds"] for step in list(told)[1:]),
        "others": median(seconds for step, seconds in enumerate(between, 1) if step % EVERY and step > EVERY),
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


def report(folder: Path) -> str:
    """The page."""
    rates = measured("disk", "", folder)
    copy, at_once, behind = (measured("save", how, folder) for how in ("copy", "at_once", "behind"))
    run_once, run_behind = (measured("train", how, folder) for how in ("at_once", "behind"))
    size = PIECE * PIECES
    beyond = behind["blocked"] - copy["blocked"]
    saves = {"a save that training waits for": at_once, "in the background": behind}
    table = [
        f"| {name} | {one['blocked']:.2f} s | {one['seconds']:.2f} s | {one['rate']:.0f} "
        f"| {one['more'] / 2**30:.2f} GiB |"
        for name, one in saves.items()
    ]
    runs = {"training waits": run_once, "in the background": run_behind}
    steps = [
        f"| {name} | {one['idle']:.2f} s | {one['saving']:.2f} s | {one['blocked']:.2f} s | {one['seconds']:.2f} s "
        f"| {one['peak'] / 2**30:.2f} GiB |"
        for name, one in runs.items()
    ]
    rest = (run_behind["saving"] - run_behind["blocked"]) / run_behind["idle"]
    return f"""# Checkpoints

Written by `python benchmarks/checkpoints.py` on {time.strftime("%Y-%m-%d")}, on {os.cpu_count()} cores.

The disk takes {rates["write"]:.0f} MB/s and gives {rates["read"]:.0f} MB/s (one flushed file of {size / 1e6:.0f} MB,
median of three). One core hashes {rates["hash"]:.0f} MB/s.

A state of {size / 2**30:.3f} GiB in {PIECES} tensors, on one process; the third save of each kind:

| | training waits | until it is whole | MB/s | more memory |
|---|---|---|---|---|
| the copy alone, into memory that is there | {copy["blocked"]:.2f} s | | | |
{chr(10).join(table)}

Beyond the copy, training waits for {max(beyond, 0) / at_once["blocked"]:.1%} of a save in the foreground (bar: 10%).
Memory grows by {behind["more"] / size:.2f} of the state (bar: one more copy). Writing, hashing, flushing, reading back
and comparing reach {at_once["rate"] / rates["write"]:.0%} of the rate at which the disk takes a plain file (bar: 80%).

A decoder whose checkpoint has {run_once["bytes"] / 2**30:.2f} GiB; {STEPS} steps, and a checkpoint every {EVERY}:

| | a step without a save | a step with one | of which it waits | until it is whole | peak memory |
|---|---|---|---|---|---|
{chr(10).join(steps)}

In the background, a step that saves takes {rest:.2f} × a step that does not, plus the time it waits (bar: 1.10). On a
CPU, hashing and writing take cores from training.
"""


def main() -> None:
    folder, part, how = Path(sys.argv[1] if sys.argv[1:] else tempfile.gettempdir()), *([*sys.argv[2:4], "", ""][:2])
    if part:
        found = {"disk": lambda: disk(folder), "save": lambda: save(folder, how), "train": lambda: train(folder, how)}
        print(json.dumps(found[part]()))
        return
    text = report(folder)
    RESULTS.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
