"""10,000 records through a model: killed on changing layouts, and what of the time and the memory is not the model's.

python benchmarks/run.py records   # writes benchmarks/results/records.md
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

COUNT, FEW, SHARED = 10_000, 1_000, 100
"""Records that are killed, that memory is compared with, and of which the time is divided."""
SHORTEST, LONGEST = 20, 120
"""Characters of a record."""
SMALL, LARGE = (32, 2), (256, 4)
"""Width and layers of the model that is killed, and of that whose time is divided."""
BATCH = 8
ASKED = "log_likelihood,layers.*.hidden"
LAYOUTS: Sequence[Sequence[str]] = (
    (),
    ("--nproc", "2", "-p", "fsdp2"),
    ("--nproc", "2", "-p", "pp", "-s", "parallel.pp=2"),
    ("--nproc", "2", "-p", "fsdp2"),
)
"""One for each kill; one process finishes."""
FORGE = (sys.executable, "-m", "forge_train_cli")


def passages() -> Iterator[str]:
    """Stretches of the standard library's sources, of many lengths."""
    library, at = Path(sysconfig.get_paths()["stdlib"]), 0
    for file in sorted(library.glob("**/*.py")):
        if "site-packages" in file.parts:
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        while len(text) >= SHORTEST:
            size = SHORTEST + at * 37 % (LONGEST - SHORTEST)
            yield text[:size]
            text, at = text[size:], at + 1


def desk(folder: Path) -> None:
    """Records: many, few, and very few."""
    texts = [json.dumps({"id": at, "text": text}) for at, text in enumerate(islice(passages(), COUNT))]
    for name, count in (("many", COUNT), ("few", FEW), ("shared", SHARED)):
        (folder / f"{name}-texts.jsonl").write_text("\n".join(texts[:count]), encoding="utf-8")


def train(folder: Path, name: str, size: tuple[int, int]) -> None:
    """A run of a model of bytes, of some width and layers."""
    settings = {
        "decoder.dim": size[0],
        "decoder.layers": size[1],
        "decoder.heads": 4,
        "decoder.max_sequence": 2048,
        "text.path": "few-texts.jsonl",
        "train.sequence": 64,
        "train.steps": 2,
        "train.evaluate_every": 0,
        "run.device": "cpu",
    }
    sets = [part for key, value in settings.items() for part in ("-s", f"{key}={value}")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*FORGE, "train", "--name", name, "--quiet", *sets]
    subprocess.run(command, cwd=folder, env=environment, check=True, stderr=subprocess.DEVNULL)


@dataclass(frozen=True)
class Used:
    """Resources that a command used."""

    seconds: float
    peak: int
    """Bytes of its process that were in memory at once."""


def used(folder: Path, data: str, out: str, outputs: str = ASKED) -> Used:
    """Wall time and memory of a command on one process."""
    began = time.monotonic()
    process = _started(folder, data, out, (), outputs)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"forge infer ended with {process.returncode}")
    return Used(time.monotonic() - began, usage.ru_maxrss * 1024)


def killed(folder: Path, out: str) -> list[int]:
    """Kill a command once on each layout, with more records on disk each time, and let it finish; records at kills."""
    stops = []
    for at, layout in enumerate(LAYOUTS, start=1):
        process = _started(folder, "many", out, layout, ASKED, start_new_session=True)
        while _done(folder / out) < at * COUNT // (len(LAYOUTS) + 1):
            if process.poll() is not None:
                raise RuntimeError(f"forge infer ended with {process.returncode} before it was killed")
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        stops.append(_done(folder / out))
    used(folder, "many", out)
    return stops


@dataclass(frozen=True)
class Shares:
    """Seconds of a job, from its first record that is read to its last that is written."""

    check: float
    """In which records are read and encoded."""
    forward: float
    """In which the model computes, with its outputs."""
    rest: float
    """In which batches are made, and results brought together and written."""
    records: int

    @property
    def outside(self) -> float:
        """Share of the time that is not the model's."""
        return 1 - self.forward / (self.check + self.forward + self.rest)


def shares(folder: Path, out: str, outputs: str) -> Shares:
    """Parts of the time of a job of the large model, in this process."""
    from forge_train.step.forward import Forward
    from forge_train_tools import infer
    from forge_train_tools.inference.share import Share

    spent = {"check": 0.0, "forward": 0.0}

    @contextmanager
    def timed(name: str, owner: Any, method: str) -> Iterator[None]:
        real = getattr(owner, method)

        def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            found = real(*arguments)
            spent[name] += time.perf_counter() - began
            return found

        with patch.object(owner, method, call):
            yield

    with timed("check", Share, "check"), timed("forward", Forward, "evaluated"):
        found = infer(
            folder / "runs" / "large", folder / "shared-texts.jsonl", folder / out, outputs=outputs.split(",")
        )
    return Shares(spent["check"], spent["forward"], found.seconds - spent["forward"], found.records)


def _done(out: Path) -> int:
    try:
        return int(json.loads((out.with_name(f"{out.name}.partial") / "job.json").read_text())["records"])
    except (OSError, ValueError):
        return 0


def _started(
    folder: Path, data: str, out: str, layout: Sequence[str], outputs: str, **more: Any
) -> subprocess.Popen[bytes]:
    asked = ("runs/small", "--data", f"{data}-texts.jsonl", "--out", out, "--outputs", outputs, "--batch", str(BATCH))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([*FORGE, "infer", *asked, *layout], cwd=folder, env=environment, **quiet, **more)
