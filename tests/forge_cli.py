"""The real command line: in this process where that is enough, in one of its own where it must be."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import warm

TESTS = Path(__file__).parent

DECODER = """\
[run]
device = "cpu"
[train]
steps = 3
global_batch = 4
micro_batch = 2
sequence = 16
evaluate_batches = 1
[checkpoint]
every = 0
[log]
every = 1
[decoder]
dim = 16
layers = 1
heads = 2
max_sequence = 64
"""
"""Forge's own model, as small as it gets, on whatever `[text]` says."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def forge(*arguments: object, environment: Mapping[str, str] | None = None) -> Ended:
    """Run a command in this process, and leave the process as it was; its ranks, if it starts any, are `warm`."""
    from forge_train_cli.app import run

    log = logging.getLogger("forge_train")
    level, propagate, handlers = log.level, log.propagate, list(log.handlers)
    out, err = io.StringIO(), io.StringIO()
    try:
        starts = warm.ranks() if "--nproc" in arguments else nullcontext()
        with starts, patch.dict(os.environ, environment or {}), redirect_stdout(out), redirect_stderr(err):
            code = run([str(argument) for argument in arguments])
    finally:
        log.level, log.propagate, log.handlers[:] = level, propagate, handlers
    return Ended(code, out.getvalue(), err.getvalue())


def environment(**more: str) -> dict[str, str]:
    """Of a process of its own: the toys can be imported there, and it takes one core."""
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def command(*arguments: object) -> list[str]:
    """What starts forge in a process of its own."""
    return [sys.executable, "-m", "forge_train_cli", *map(str, arguments)]


def start(*arguments: object, preloaded: bool = False, **more: Any) -> subprocess.Popen[str]:
    """Start a command in a process of its own, where torch may be there already: see `warm`."""
    more.setdefault("env", environment())
    return (warm.Popen if preloaded else subprocess.Popen)(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8", **more
    )


def forge_process(*arguments: object, timeout: float = 600, **more: Any) -> Ended:
    """Run a command in a process of its own."""
    process = start(*arguments, **more)
    out, err = process.communicate(timeout=timeout)
    return Ended(process.returncode, out, err)


def one_message(ended: Ended, code: int) -> str:
    """What a command that failed said: one message, no traceback."""
    said = ended.out + ended.err
    assert ended.code == code, said
    assert "Traceback" not in said, said
    _before, *messages = re.split(r"^Error: ", ended.err, flags=re.MULTILINE)
    assert len(messages) == 1, said
    return messages[0].strip()


def killed_writing(out: Path, asked: Sequence[object], layouts: Iterable[Sequence[object]]) -> int:
    """Start a command once on each layout, each time to be killed after its second write; returns the records that
    the file then has."""
    state, before = out.with_name(f"{out.name}.partial") / "job.json", 0
    for layout in layouts:
        launched = "--nproc" in layout
        ended = forge_process(*asked, *layout, "-p", "dying_answers:Dies", preloaded=True)
        assert ended.code == (1 if launched else -signal.SIGKILL), ended.err
        assert not launched or "Rank 0 was killed by SIGKILL" in ended.err
        done = int(json.loads(state.read_text(encoding="utf-8"))["records"])
        assert done > before
        before = done
    return before
