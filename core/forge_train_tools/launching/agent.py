"""torchrun's elastic agent in this process, made to say who failed first, where, and who only followed."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from forge_train.base.format import format_list
from forge_train.mesh.world import FORGE_LAUNCHED

from .causes import as_words, by_cause, frames, top, without_a_word
from .launch import Ended, Restart, WorkerCommand, WorkerResult, awaited, left
from .places import Places

HERE = "127.0.0.1"
GRACE = 0.3
"""Seconds that the others have to say what they saw, once a rank has failed."""
GRACE_OF_TIMEOUT = 2.0
"""The same after a timeout: ranks that wait for one that hangs do not give up in the same moment."""
GRACE_OF_MISTAKE = 5.0
"""The same after a mistake, which as a rule every rank finds by itself."""
GRACE_OF_RECORDS = 3.0
"""The same for rank 0, which writes down how the run ended."""
STACKS = 0.5
"""Seconds for a rank to write its stacks."""
_PASSED_ON = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGHUP: signal.SIGTERM,
}
"""Signal to this process → to the ranks. They have sessions of their own, so that Ctrl-C reaches only this one."""


def run_agent(
    task: WorkerCommand,
    nproc: int,
    *,
    max_restarts: int,
    last_step: Callable[[], int],
    on_restart: Callable[[Restart], None],
) -> Ended:
    """See `forge_train_tools.launching.launch.launch`."""
    if "LOGLEVEL" not in os.environ:  # torch's own switch
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ[FORGE_LAUNCHED] = str(os.getpid())
    hasten_rendezvous()
    run_id = uuid.uuid4().hex
    rendezvous = get_rendezvous_handler(
        RendezvousParameters("c10d", f"{HERE}:0", run_id, 1, 1, local_addr=HERE, is_host=True, timeout=60)
    )
    with tempfile.TemporaryDirectory(prefix="forge-launch-") as scratch:
        spec = WorkerSpec(
            role="forge",
            local_world_size=nproc,
            rdzv_handler=rendezvous,
            entrypoint=sys.executable,
            args=("-P", "-m", "forge_train_tools.launching.launched", str(task.folder.absolute())),
            max_restarts=max_restarts,
            monitor_interval=0.1,
            local_addr=HERE,
        )
        agent = _Agent(spec, DefaultLogsSpecs(log_dir=scratch), task, last_step, on_restart)
        try:
            with agent.signals():
                agent.run()
        except SignalException as error:
            agent.signal = int(error.sigval)
        finally:
            rendezvous.shutdown()
            del os.environ[FORGE_LAUNCHED]
    return agent.ended()


def hasten_rendezvous() -> None:
    """Have torch (2.13) name who tells an event by its frame; it reads the source of every frame of the stack for it,
    which took a second of each launch."""
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name


class _Agent(LocalElasticAgent):
    """Looks at the ranks before torch's agent does, which would end the others by SIGTERM: to forge, a request to save,
    with everybody."""

    def __init__(
        self,
        spec: WorkerSpec,
        logs: DefaultLogsSpecs,
        task: WorkerCommand,
        last_step: Callable[[], int],
        on_restart: Callable[[Restart], None],
    ) -> None:
        super().__init__(spec, logs)
        self.task, self.last_step, self.on_restart = task, last_step, on_restart
        self.restarts = spec.max_restarts
        self.places = Places(spec.local_world_size, task.smaller)
        self.signal = 0
        """The signal that ended the ranks at once."""
        self._asked = 0
        """The signal that asked them to stop."""
        self._attempt = 0
        self._outcomes: list[WorkerResult] = []
        """Outcome of the current attempt, once it is judged."""
        self._before: dict[int, Any] = {}

    # -- what torch calls -------------------------------------------------------------------------

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._check_not_asked()
        self._outcomes = []
        self._attempt = self.restarts - int(self._remaining_restarts)
        with self.places.devices():
            started: dict[int, Any] = super()._start_workers(worker_group)
        self._handle()  # torch has put handlers of its own
        self._check_not_asked()
        return started

    def _check_not_asked(self) -> None:
        """Start nothing for a signal that came while there was no rank to pass it on to."""
        if self._asked:
            raise SignalException("asked to stop between attempts", signal.Signals(self._asked))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if not self._outcomes:
            if all(outcome.well for outcome in self._ended_so_far().values()):
                # torch would take a process that was killed after it had left how it ended, or one that failed since
                # the line above, for a reason to start all again.
                running = any(process.poll() is None for process in self._processes().values())
                state = WorkerState.HEALTHY if running else WorkerState.SUCCEEDED
                return RunResult(state, return_values={worker.global_rank: None for worker in worker_group.workers})
            self._judge()
        found: RunResult = super()._monitor_workers(worker_group)
        return found

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *more: Any, **options: Any) -> None:
        super()._shutdown(signal.SIGKILL, *more, **options)

    # -- signals ----------------------------------------------------------------------------------

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Pass signals on while the block lasts."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        everything = {*_PASSED_ON, signal.SIGQUIT}
        self._before = {number: signal.getsignal(number) for number in everything}
        self._handle()
        try:
            yield
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _handle(self) -> None:
        for number, before in self._before.items():
            ignored = number == signal.SIGHUP and before is signal.SIG_IGN  # by nohup
            passed_on = number in _PASSED_ON and not ignored
            signal.signal(number, self._pass_on if passed_on else before)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            self.signal = number
            self._kill(wait=False)  # this handler may have interrupted a wait for one of them
            return
        self._asked = number
        for process in self._processes().values():
            if process.poll() is None:
                process.send_signal(_PASSED_ON[signal.Signals(number)])

    # -- how the ranks ended ----------------------------------------------------------------------

    def _processes(self) -> dict[int, Any]:
        return getattr(self._pcontext, "subprocess_handlers", {}) and {
            rank: handler.proc
            for rank, handler in self._pcontext.subprocess_handlers.items()  # type: ignore[union-attr]
        }

    def _ended_so_far(self) -> dict[int, WorkerResult]:
        """Ranks that ended, or said how they are about to."""
        found: dict[int, WorkerResult] = {}
        for rank, process in self._processes().items():
            outcome = left(self.task.folder, self._attempt, rank)
            if outcome is not None and (outcome.code or process.poll() is not None):
                found[rank] = outcome
            elif (code := process.poll()) is not None:
                found[rank] = left(self.task.folder, self._attempt, rank) or self._without_a_word(rank, code)
        return found

    def _without_a_word(self, rank: int, code: int) -> WorkerResult:
        return WorkerResult(rank, 1, "killed", without_a_word(code, self._when(), self.task.log(rank)))

    def _when(self) -> str:
        step = self.last_step()
        return f"after step {step}" if step else "before the first step was logged"

    def _judge(self) -> None:
        """A rank failed: hear the others, end them, and decide whether it is worth another attempt."""
        ended = self._hear(GRACE)
        if any(outcome.code not in (0, 1) for outcome in ended.values()):
            ended = self._hear(GRACE_OF_MISTAKE)
        elif 0 not in ended:
            ended = self._hear(GRACE_OF_RECORDS)
        kinds = {outcome.kind for outcome in ended.values() if not outcome.well}
        hung: dict[int, WorkerResult] = {}
        if kinds <= {"timeout", "lost"} and "timeout" in kinds:
            ended = self._hear(GRACE_OF_TIMEOUT)
            hung = self._stacks([rank for rank in self._processes() if rank not in ended], awaited(ended.values()))
        silent = [rank for rank in self._processes() if rank not in ended and rank not in hung]
        self._kill()
        everybody = [*ended.values(), *hung.values(), *(WorkerResult(rank, 1, "lost") for rank in silent)]
        self._outcomes = by_cause(self._placed(everybody))
        first = self._outcomes[0]
        full = any(outcome.disk_full for outcome in everybody)
        if self._asked or first.code not in (0, 1) or full:  # told to stop, or another attempt would change nothing
            self._remaining_restarts = 0
        elif self._remaining_restarts:
            self._prepare_restart(first)

    def _prepare_restart(self, first: WorkerResult) -> None:
        """Choose the places of the next attempt, and tell of it."""
        own = [one.rank for one in self._outcomes if not one.well and one.kind in ("own", "killed", "hung")]
        self.places.after(own)
        world, attempt = len(self.places.used), self._attempt + 1
        self._worker_group.spec.local_world_size = world
        who = "All ranks"
        if lost := self.places.lost:
            failed = f"Place{'s' * (len(lost) > 1)} {format_list(lost, 8)} failed twice in a row"
            who = f"{failed}; {world} of {self.places.count} ranks will"
        why = f"{first.who} {as_words(first)} {who} start again (attempt {attempt} of {self.restarts})."
        self.on_restart(Restart(why, first, attempt, world))

    def _placed(self, outcomes: Iterable[WorkerResult]) -> list[WorkerResult]:
        return self.task.placed(outcomes, len(self._processes()))

    def _hear(self, seconds: float) -> dict[int, WorkerResult]:
        deadline = time.monotonic() + seconds
        while len(ended := self._ended_so_far()) < len(self._processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return ended

    def _stacks(self, ranks: list[int], waiting: str) -> dict[int, WorkerResult]:
        """Find where ranks hang for which the others waited in vain."""
        logs = {rank: self.task.log(rank) for rank in ranks}
        sizes = {rank: log.stat().st_size if log.exists() else 0 for rank, log in logs.items()}
        for rank in ranks:
            self._processes()[rank].send_signal(signal.SIGUSR2)
        time.sleep(STACKS)
        found = {}
        for rank, log in logs.items():
            stacks = log.read_bytes()[sizes[rank] :].decode(errors="replace") if log.exists() else ""
            message = (
                f"hangs {self._when()}; the others waited for it in {waiting or 'vain'}.{top(stacks)}\n"
                f"Its stacks are in {log}."
            )
            found[rank] = WorkerResult(rank, 1, "hung", message)
        in_their_own_code = {r: one for r, one in found.items() if "distributed_c10d" not in frames(one.message)[:1]}
        return in_their_own_code or found

    def _kill(self, *, wait: bool = True) -> None:
        for process in self._processes().values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes().values() if wait else ():
            with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel holds it: torch's agent gives up too
                process.wait(10)

    def ended(self) -> Ended:
        """Outcome of the last attempt."""
        outcomes = self._outcomes or by_cause(self._placed(self._ended_so_far().values()))
        if self._asked and any(one.kind == "killed" for one in outcomes) and not self.signal:
            self.signal = self._asked  # it came before they could save
        return Ended(outcomes, self.signal)
