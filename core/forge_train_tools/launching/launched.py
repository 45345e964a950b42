"""One of several local processes, started by forge's own launcher alone.

python -m forge_train_tools.launching.launched FOLDER
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import os
import signal
import sys
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from forge_train.base.errors import Failure, ForgeError
from forge_train.base.files import DiskError
from forge_train.mesh.world import FORGE_LAUNCHED, World
from forge_train_kit.failures import failure_of, kind

from ..messages import explain
from .ending import told
from .launch import WorkerResult, leave

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Do what `job.json` says, and leave how it ended."""
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    die_with(int(os.environ[FORGE_LAUNCHED]))
    # Until the run has handlers of its own, a signal ends the process, without Python's traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    world = World.here()
    log = Path(job["logs"]) / f"rank-{world.rank}.log"
    said = 0
    try:
        _speak_into(log, everything=world.rank > 0 or job["quiet"])
        said = log.stat().st_size
        sys.path[:], sys.argv = job["path"], job["argv"]
        module, _, name = job["function"].partition(":")
        with told(partial(_leave_for, folder, world)):
            result: dict[str, Any] = getattr(importlib.import_module(module), name)(**job["arguments"])
        outcome = WorkerResult(world.rank, result.get("code", 0), result=result)
    except Exception as error:
        code = error.code if isinstance(error, ForgeError) else 1
        failure, full = failure_of(error, world.rank).as_json(), isinstance(error, DiskError) and error.full
        outcome = WorkerResult(world.rank, code, kind(error), explain(error, log), failure=failure, disk_full=full)
        if not isinstance(error, ForgeError):
            with suppress(OSError):  # a full disk: the outcome is what counts
                _keep_traceback(error, log, said)
    leave(folder, world.attempt, outcome)
    _flush()
    if outcome.code == 1:
        os._exit(1)  # a process group that lost a member may wait for it while Python shuts down


def _leave_for(folder: Path, world: World, error: ForgeError, rank: int) -> None:
    """A thread ends this process because of a rank that does not end: leave its outcome, and then this one's."""
    failure = Failure.of(error, rank)
    message = failure.message.removeprefix(f"Rank {rank} ")
    leave(folder, world.attempt, WorkerResult(rank, error.code, "hung", message, failure=failure.as_json()))
    if rank != world.rank:
        leave(folder, world.attempt, WorkerResult(world.rank, error.code, "lost"))


def _keep_traceback(error: Exception, log: Path, said: int) -> None:
    """A run writes it into its log itself, once it has begun."""
    if b"Traceback" not in log.read_bytes()[said:]:
        with log.open("a", encoding="utf-8") as out:
            out.write("".join(traceback.format_exception(error)))


def _flush() -> None:
    """Have everything in the log; what it has no room for must not become this process's exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def die_with(parent: int) -> None:
    """End when another process ends, however it does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        raise SystemExit(1)


def _speak_into(log: Path, *, everything: bool) -> None:
    """Have this process write into its log: the stacks of its threads on SIGUSR2 and where it crashes, and everything
    that is no longer for the screen."""
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
    faulthandler.enable(file=file, all_threads=True)
    if everything:
        os.dup2(file, 1)
        os.dup2(file, 2)


if __name__ == "__main__":
    main()
