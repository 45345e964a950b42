"""Processes over gloo that are started once and run one case after another: a distributed test costs no new launch.

A case is a function that can be imported, with arguments that are JSON. Every rank calls it in a process group of the
case's own, so that a case on 2 ranks and one on 4 share the processes but nothing else.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

from . import hanging

if TYPE_CHECKING:
    from torch.distributed import TCPStore

Case = str | Callable[..., Any]
Replies = dict[int, dict[str, Any]]
GRACE = 120.0
"""Seconds that the other ranks have to end once one has failed."""
ANSWER = 10.0
"""Seconds that ranks that do not end have to name their collectives, which not every one of them can."""
MOST = 40_000
"""Characters that are shown of what a rank writes then."""


class PoolError(Exception):
    """A case failed: which ranks, and their tracebacks; `values` is what the others returned."""

    def __init__(self, message: str, values: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.values = values


class Pool:
    """Up to `size` ranks, each started when it is first needed. A context manager; `close` ends the processes.

    Args:
        folder: where the ranks' output goes.
        size: the largest world.
        threads: OMP_NUM_THREADS of each rank.
    """

    def __init__(self, folder: Path, size: int = 8, threads: int = 1) -> None:
        self._folder, self._size, self._threads = folder, size, threads
        self._workers: list[_Worker] = []
        self._starter: _Starter | None = None
        self._store: TCPStore | None = None
        self._numbers = itertools.count()
        self._kept: tuple[int, int] | None = None
        """The world and the number of the process group that the last case has left."""

    def run(
        self, case: Case, world: int = 2, *, timeout: float = 600.0, keep: bool = False, **arguments: Any
    ) -> list[Any]:
        """Call a function on `world` ranks; what each returned, in order of ranks.

        Args:
            case: `module:function`, or a function that can be imported as such. It finds its process group made, and
                RANK, WORLD_SIZE and LOCAL_RANK set as torchrun would.
            world: number of ranks.
            timeout: seconds, less those of waiting for a core, until it counts as hanging: it is ended and shows where.
            keep: whether the next case that keeps, too, may continue with this one's process group and meshes.
            **arguments: of the function; JSON.

        Raises:
            PoolError: if a rank failed or hung.
        """
        if not 1 <= world <= self._size:
            raise ValueError(f"the pool has 1 to {self._size} ranks, not {world}")
        name = case if isinstance(case, str) else f"{case.__module__}:{case.__qualname__}"
        port = self._start(world)
        if not (keep and self._kept and self._kept[0] == world):
            self._kept = (world, next(self._numbers))
        request = {
            "case": name,
            "arguments": arguments,
            "group": self._kept[1],
            "keep": keep,
            "world": world,
            "path": sys.path,
            "port": port,
        }
        workers = self._workers[:world]
        for worker in workers:
            worker.begin(request)
        replies: Replies = {}
        what = f"{name} on {world} ranks"
        try:
            self._collect(replies, workers, timeout, keep)
        except BaseException as error:  # a test's own time limit, or Ctrl-C
            if not isinstance(error, KeyboardInterrupt):
                error.add_note("\n".join([what, *_troubles(workers, replies, "has not ended")]))
            self._end_ranks()  # the next case must not get this one's replies
            raise
        silent = len(replies) < world
        failed = any("error" in reply for reply in replies.values())
        if silent or not all(reply.get("kept") for reply in replies.values()):
            self._kept = None
        if not silent and not failed:
            return [replies[worker.rank]["value"] for worker in workers]
        troubles = _troubles(workers, replies, "did not end" if failed else f"hung for {timeout:g} s")
        if silent:
            self._end_ranks()
        raise PoolError("\n".join([what, *troubles]), [one["value"] for one in replies.values() if "value" in one])

    def close(self) -> None:
        """End the processes; the next case starts others."""
        self._end_ranks()
        if self._starter:
            self._starter.end()
        self._starter = None

    def _end_ranks(self) -> None:
        for worker in self._workers:
            worker.end()
        self._workers = []
        self._store = self._kept = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _start(self, world: int) -> int:
        """Have that many processes; the port of the store they meet at."""
        from torch.distributed import TCPStore

        if self._starter and self._starter.process.poll() is not None:
            self.close()
        if any(worker.process.poll() is not None for worker in self._workers):
            self._end_ranks()
        if self._starter is None:
            self._starter = _Starter.start(self._folder, self._threads)
        if self._store is None:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        while len(self._workers) < world:
            rank = len(self._workers)
            self._workers.append(_Worker.start(self._starter, rank, self._store.port, self._folder))
        return int(self._store.port)

    def _collect(self, replies: Replies, workers: Sequence[_Worker], timeout: float, keep: bool) -> None:
        """Put replies by rank there, of those that come in time. A rank has failed that leaves a group to be kept."""
        clock = hanging.Clock([worker.process.pid for worker in workers])
        deadline = clock.now() + timeout
        with selectors.DefaultSelector() as selector:
            for worker in workers:
                selector.register(worker.replies, selectors.EVENT_READ, worker)
            while len(replies) < len(workers) and (left := deadline - clock.now()) > 0:
                for key, _ in selector.select(min(left, hanging.GLANCE)):
                    worker = key.data
                    reply = worker.reply()
                    replies[worker.rank] = reply
                    selector.unregister(worker.replies)
                    if "error" in reply or (keep and not reply["kept"]):
                        deadline = min(deadline, clock.now() + GRACE)


@dataclass
class _Starter:
    """The process that starts ranks, from outside."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    output: Path

    @classmethod
    def start(cls, folder: Path, threads: int) -> Self:
        ours, theirs = socket.socketpair()
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "FORGE_POOL": json.dumps({"control": theirs.fileno(), "parent": os.getpid()}),
        }
        output = folder / "ranks.log"
        with theirs, output.open("ab") as out:
            command = [sys.executable, "-m", "forge_train_tools.testing.worker"]
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment, pass_fds=(theirs.fileno(),)
            )
        return cls(process, ours, output)

    def ask(self, *files: int, **what: Any) -> Any:
        try:
            socket.send_fds(self.control, [json.dumps(what).encode()], files)
            return json.loads(self.control.recv(4096))
        except (OSError, ValueError):
            said = self.output.read_text(errors="replace")[-4000:].rstrip()
            raise PoolError(f"the process that starts ranks ended with {self.process.wait()}\n{said}") from None

    def end(self) -> None:
        self.control.close()
        self.process.kill()
        self.process.wait()


@dataclass
class _Process:
    """A rank, which is a child of the process that started it."""

    pid: int
    starter: _Starter
    code: int | None = None

    def poll(self, *, block: bool = False) -> int | None:
        if self.code is None:
            try:
                self.code = self.starter.ask(wait=self.pid, block=block)
            except PoolError:  # with which its ranks end
                self.code = -signal.SIGKILL
        return self.code

    def wait(self) -> int | None:
        return self.poll(block=True)

    def send_signal(self, number: int) -> None:
        if self.code is None:  # until then nobody else gets its number
            os.kill(self.pid, number)


@dataclass
class _Worker:
    """One rank's process, from outside."""

    rank: int
    process: _Process
    requests: IO[bytes]
    replies: IO[bytes]
    output: Path
    began: int = 0
    """Position in the output at which the current case began."""

    @classmethod
    def start(cls, starter: _Starter, rank: int, port: int, folder: Path) -> Self:
        (read, requests), (replies, write) = os.pipe(), os.pipe()
        output = folder / f"rank-{rank}.log"
        with output.open("ab") as out:
            process = _Process(starter.ask(read, write, out.fileno(), rank=rank, port=port), starter)
        os.close(read)
        os.close(write)
        return cls(rank, process, os.fdopen(requests, "wb"), os.fdopen(replies, "rb"), output)

    def begin(self, request: dict[str, Any]) -> None:
        self.began = self.output.stat().st_size
        with contextlib.suppress(BrokenPipeError):  # it has died: `reply` says how
            self.requests.write(json.dumps(request).encode() + b"\n")
            self.requests.flush()

    def reply(self) -> dict[str, Any]:
        line = self.replies.readline()
        if line:
            reply: dict[str, Any] = json.loads(line)
            return reply
        code = self.process.wait()
        return {"error": f"the process ended with {code}\n{self.said()}"}

    def said(self, most: int = 4000) -> str:
        """The end of what the case at hand has written."""
        return self.output.read_bytes()[self.began :].decode(errors="replace")[-most:].rstrip()

    def end(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):
            self.requests.close()
        self.replies.close()


def _troubles(workers: Sequence[_Worker], replies: Mapping[int, dict[str, Any]], why: str) -> list[str]:
    """A text of each rank that failed, and of each that does not end: what it writes at this signal, and its stacks in
    C++."""
    failed = [f"rank {rank} failed:\n{reply['error'].rstrip()}" for rank, reply in replies.items() if "error" in reply]
    silent = [worker for worker in workers if worker.rank not in replies]
    for worker in silent:
        worker.began = worker.output.stat().st_size
        worker.process.send_signal(signal.SIGUSR2)
    for end, seconds in ((hanging.LAST_FRAME, GRACE), (hanging.LAST_COLLECTIVE, ANSWER)):
        deadline = time.monotonic() + seconds
        while not all(end in worker.said(MOST) for worker in silent) and time.monotonic() < deadline:
            if all(worker.process.poll() is not None for worker in silent):
                break
            time.sleep(0.05)
    return failed + [
        f"rank {worker.rank} {why}:\n{worker.said(MOST)}\n{hanging.stacks(worker.process.pid)}" for worker in silent
    ]
