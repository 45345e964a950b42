"""The ranks of one node of several: started with torchrun's variables, watched, and ended together.

python -m forge_train_tools.launching.node [--max-restarts K] [--follow-stdin] -- train …

torchrun's own variables say where the node is: PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE, PET_MASTER_ADDR and
PET_MASTER_PORT. Unlike torchrun, it passes SIGTERM, SIGINT and SIGUSR1 on and waits for the ranks to save, and ends
with the exit code of `forge train`: 75 after an interruption, that of the rank that failed first, 128 + n after a
second signal n.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial

from forge_train.base.errors import INTERRUPTED, ConfigError, DivergedError
from forge_train.mesh.world import FORGE_LAUNCHER, integer

from .launched import die_with

NAME = "forge launch"
POLL = 0.05
GRACE = 20.0
"""Seconds that the other ranks have to end by themselves, and rank 0 to write down how, once one has failed."""
SAVING = 300.0
"""Seconds that the other ranks have to end once one has ended well."""
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_FINAL = (0, ConfigError.code, DivergedError.code, INTERRUPTED)
"""Exit codes after which another attempt would change nothing."""


class Node:
    """The ranks of this node.

    Args:
        arguments: those of `forge`.
        environment: with the variables of torchrun.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = [sys.executable, "-P", "-m", "forge_train_cli", *arguments]
        self._nproc = integer(environment, "PET_NPROC_PER_NODE", 1)
        self._first = integer(environment, "PET_NODE_RANK", 0) * self._nproc
        nodes = integer(environment, "PET_NNODES", 1)
        if not 0 <= self._first < nodes * self._nproc:
            raise ConfigError(f"The environment has PET_NODE_RANK={environment.get('PET_NODE_RANK')} of {nodes} nodes.")
        self._environment = {
            **environment,
            FORGE_LAUNCHER: environment.get(FORGE_LAUNCHER, NAME),
            "WORLD_SIZE": str(nodes * self._nproc),
            "LOCAL_WORLD_SIZE": str(self._nproc),
            "MASTER_ADDR": environment.get("PET_MASTER_ADDR", "127.0.0.1"),
            "MASTER_PORT": environment.get("PET_MASTER_PORT", "29500"),
            "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // self._nproc, 1))),
        }
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._asked = 0
        """The signal that asked the ranks to stop."""
        self._ended_by = 0
        """The signal that ended them."""

    def run(self, max_restarts: int) -> int:
        """Start the ranks, and again after a failure; returns the exit code."""
        for attempt in range(max_restarts + 1):
            self._start()
            code = self._wait()
            if code in _FINAL or self._asked or attempt == max_restarts:
                return code
            say(f"The ranks of this node start again (attempt {attempt + 1} of {max_restarts}).")
        return code

    def handle(self, number: int, _frame: object = None) -> None:
        """Ask the ranks to stop; the second time, end them."""
        if self._asked:
            self._ended_by = number
            self._kill()
            return
        self._asked = number
        for rank in self._ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    def follow(self) -> None:
        """Take signals from stdin, by their names in lines; its end, when whoever started this node is gone, asks the
        ranks to stop."""
        for line in sys.stdin:
            os.kill(os.getpid(), signal.Signals[line.strip()])
        if not self._asked:
            os.kill(os.getpid(), signal.SIGTERM)

    def _start(self) -> None:
        self._ranks = []
        for local in range(self._nproc):
            own = {"RANK": str(self._first + local), "LOCAL_RANK": str(local)}
            self._ranks.append(
                subprocess.Popen(
                    self._command,
                    env={**self._environment, **own},
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    preexec_fn=partial(die_with, os.getpid()),  # noqa: PLW1509 - no other thread holds a lock
                )
            )
        if self._asked:  # while there was no rank to pass it on to
            number, self._asked = self._asked, 0
            self.handle(number)

    def _wait(self) -> int:
        """Wait for all ranks, and end those that wait in vain for one that is gone."""
        failed, deadline = 0, float("inf")
        while (codes := [rank.poll() for rank in self._ranks]).count(None):
            if not failed and (bad := [code for code in codes if code not in (None, 0, INTERRUPTED)]):
                failed, deadline = bad[0] or 0, time.monotonic() + GRACE
            elif deadline == float("inf") and any(code is not None for code in codes):
                deadline = time.monotonic() + SAVING
            if time.monotonic() > deadline:
                self._kill()
            time.sleep(POLL)
        if self._ended_by:
            return 128 + self._ended_by
        ended = [rank.returncode for rank in self._ranks]
        for local, code in enumerate(ended):
            if code < 0 and code == (failed or code):
                say(f"Rank {self._first + local} was killed by {signal.Signals(-code).name}.")
        failed = failed or next((code for code in ended if code not in (0, INTERRUPTED)), 0)
        if failed:
            return failed if failed > 0 else 1
        return max(ended)

    def _kill(self) -> None:
        for rank in self._ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="forge_train_tools.launching.node", allow_abbrev=False)
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("--follow-stdin", action="store_true")
    parser.add_argument("arguments", nargs="+")
    asked = parser.parse_args()
    node = Node(asked.arguments, os.environ)
    for number in _PASSED_ON:
        signal.signal(number, node.handle)
    if asked.follow_stdin:
        threading.Thread(target=node.follow, daemon=True).start()
    return node.run(asked.max_restarts)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        say(f"Error: {error}")
        sys.exit(error.code)
