"""A thread beside training: heartbeats of this rank, and a report when a step stalls."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from forge_train import CommunicationError, Job
from forge_train.base.errors import Failure
from forge_train.base.files import write_json
from forge_train.mesh.world import FORGE_LAUNCHED
from forge_train_tools.launching.ending import end_process
from forge_train_tools.stacks import Place, dump, dump_collectives, place

from .verdict import Heartbeat, message

log = logging.getLogger("forge_train")

clock: Callable[[], float] = time.monotonic
"""Seconds by which a step is late."""
end: Callable[[CommunicationError, int], object] = end_process
"""Ends a job."""
LONGEST_BEAT = 10.0
"""Seconds between heartbeats, at most."""
LAST_WORDS = 30.0
"""Seconds that ranks wait for the one that speaks for all, before they end by themselves."""
CROWD = 64
"""Ranks above which not every rank reads the heartbeats of all."""
SPEAKERS = 8
"""The lowest ranks of such a crowd, whose heartbeats all read."""


class Heart:
    """Knows how far this rank is; another thread looks whether it gets any further.

    Args:
        job: the run.
        seconds: how long a part of a step may take.
        slow: how long the first step, an evaluation and a save may take.
    """

    def __init__(self, job: Job, seconds: float, slow: float) -> None:
        self._job, self._seconds, self._slow = job, seconds, slow
        self._interval = min(seconds / 20, LONGEST_BEAT)
        self._folder = job.run.dir / "log" / "heartbeat"
        self._stalled = job.run.dir / "log" / "stalled"
        self._alive = job.run.dir / "log" / "alive.json"
        self._main = threading.get_ident()
        self._marks, self._step, self._phase, self._since = 0, 0, "start", clock()
        self._settled = False
        self._beats = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    # -- what the run tells ----------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """A step begins that follows this one. With the first, the watch begins."""
        self.mark("data")
        if self._thread.ident is not None:
            return
        rank = self._job.dist.rank
        for folder, names in ((self._folder, (".json",)), (self._stalled, (".txt", "-collectives.json"))):
            folder.mkdir(parents=True, exist_ok=True)
            for name in names:  # of an earlier attempt; thousands of ranks do not list a folder of thousands of files
                (folder / f"rank-{rank}{name}").unlink(missing_ok=True)
        self._step = step
        self._beat(0.0, stalled=False)  # a process that stops at once is known, too
        self._thread.start()

    def mark(self, phase: str, step: int | None = None) -> None:
        """A part of a step begins."""
        self._marks += 1
        self._phase, self._since = phase, clock()
        if step is not None:
            self._step, self._settled = step, True

    @contextmanager
    def during(self, phase: str, after: str) -> Iterator[None]:
        """Mark both ends of a block."""
        self.mark(phase)
        yield
        self.mark(after)

    def stop(self) -> None:
        """The run is over, however it ended."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
            if self._job.dist.main:
                self._show_alive("over")

    # -- the thread ------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            while not self._over.wait(self._interval):
                seen, late = self._marks, clock() - self._since
                stalled = late > self._limit
                self._beat(late, stalled=stalled)
                if self._job.dist.main and not stalled:
                    self._show_alive(self._part)
                if stalled and self._confirmed(seen):
                    return
        except OSError as error:
            log.warning("The watchdog has stopped: %s", error)

    @property
    def _part(self) -> str:
        """Return the current part of the run. Code of other plugins around a span counts as the span, though it may lie
        outside the marks."""
        span = next(iter(self._job.hooks.inside[-1:]), None)
        return self._phase if span is None or (span == "step" and self._phase != "between steps") else span

    @property
    def _limit(self) -> float:
        return self._seconds if self._settled and self._part not in ("evaluate", "save") else self._slow

    def _show_alive(self, phase: str) -> None:
        write_json(self._alive, {"step": self._step, "phase": phase, "time": time.time()})

    def _beat(self, late: float, *, stalled: bool, last: str = "") -> None:
        self._beats += 1
        where = place(self._main) if stalled else Place("", "")
        Heartbeat(
            rank=self._job.dist.rank,
            beat=self._beats,
            marks=self._marks,
            step=self._step + 1,
            phase=self._part,
            seconds=late,
            stalled=stalled,
            at=where.at,
            awaits=where.awaits,
            last=last,
            host=socket.gethostname(),
            pid=os.getpid(),
        ).write(self._folder)

    def _confirmed(self, marks: int) -> bool:
        """This rank is late: write down where it is, hear the others, and have one speak. False if it went on."""
        rank, late = self._job.dist.rank, clock() - self._since
        dump(self._stalled / f"rank-{rank}.txt")
        last = dump_collectives(self._stalled / f"rank-{rank}-collectives.json")
        speaks, patience = self._lower(late, last), LAST_WORDS
        if speaks is None:
            beats, silent = self._hear(late, last)
            speaks = min((other for other, beat in beats.items() if beat.stalled and other not in silent), default=rank)
        else:
            patience += 4 * self._patience  # it may still be hearing the others
        if self._marks != marks or self._over.is_set():
            log.warning("Step %d went on after %.0f s in %s.", self._step + 1, late, self._part)
            return False
        if speaks == rank:
            self._speak(beats, silent)
            return True
        deadline = time.monotonic() + patience
        while self._marks == marks and not self._over.wait(self._interval):
            if time.monotonic() > deadline:
                self._end(rank, f"Rank {rank} ends: a step has stalled, and rank {speaks} does not say where.")
        return self._over.is_set()

    @property
    def _patience(self) -> float:
        """Seconds in which a rank that is alive gives a heartbeat."""
        return max(self._interval * 5, 1.0)

    def _lower(self, late: float, last: str) -> int | None:
        """In a crowd, a rank among the lowest that is late too, and speaks; None if this rank has to hear all. So the
        files that all ranks read together grow with their number, and not with its square."""
        few = range(min(self._job.dist.rank, SPEAKERS if self._job.dist.world > CROWD else 0))
        deadline = time.monotonic() + 2 * self._patience
        while few and time.monotonic() < deadline:
            self._beat(late, stalled=True, last=last)
            for other in few:
                if (beat := Heartbeat.read(self._folder, other)) and beat.stalled:
                    return other
            if self._over.wait(self._interval):
                break
        return None

    def _hear(self, late: float, last: str) -> tuple[dict[int, Heartbeat], set[int]]:
        """The heartbeats of all ranks, and those that give none; until all are late, or have had time to be."""
        world, folder = range(self._job.dist.world), self._folder
        first = {rank: Heartbeat.read(folder, rank) for rank in world}
        deadline = time.monotonic() + 2 * self._patience
        while True:
            self._beat(late, stalled=True, last=last)
            beats = {rank: beat for rank in world if (beat := Heartbeat.read(folder, rank))}
            silent = {rank for rank in world if rank not in beats or _same(first[rank], beats[rank])}
            heard = not silent and all(beat.stalled for beat in beats.values())
            if self._over.wait(self._interval) or heard or time.monotonic() > deadline:
                return beats, silent

    def _speak(self, beats: dict[int, Heartbeat], silent: set[int]) -> None:
        """Say which rank hangs, and end the job."""
        for rank in silent & beats.keys():
            self._ask_for_stacks(beats[rank])
        blamed, text = message(beats, silent, self._stalled)
        error = CommunicationError(text)
        log.error("%s", text, extra={"screen": False})
        try:
            self._job.run.fail(Failure.of(error, blamed), error.code, self._step, None)
        finally:
            self._end(blamed, text)

    def _ask_for_stacks(self, beat: Heartbeat) -> None:
        """Have a process that holds Python's lock write its stacks into its log; Forge's launcher has it listen."""
        if FORGE_LAUNCHED in os.environ and beat.host == socket.gethostname():
            try:
                os.kill(beat.pid, signal.SIGUSR2)
            except ProcessLookupError:
                log.info("Rank %d is gone.", beat.rank)

    def _end(self, rank: int, text: str) -> None:
        end(CommunicationError(text), rank)


def _same(before: Heartbeat | None, now: Heartbeat) -> bool:
    """Return True if a rank that is not known to be late has sent no heartbeat in between."""
    return before is not None and not now.stalled and before.beat == now.beat
