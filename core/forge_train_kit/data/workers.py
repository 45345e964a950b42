"""Threads that do tasks ahead, each by itself or through a process of its own; what they did comes in any order."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from forge_train.base.errors import ForgeError

from .child import Child, DiedError, Payload

log = logging.getLogger("forge_train")

_T = TypeVar("_T")
_LOOKS_EVERY = 1.0
"""Seconds between two looks at whether a worker hangs."""
_STOPS_WITHIN = 5.0
"""Seconds that a thread may take to end."""


class WorkerError(ForgeError):
    """A worker died, or hangs."""

    type = "data"


class Task(Generic[_T]):
    """Task of a worker: call the function with some arguments.

    Args:
        arguments: of the call.
        what: names the task in messages; called only on a failure.
    """

    def __init__(self, arguments: tuple[Any, ...], what: Callable[[], str]) -> None:
        self.arguments, self.what = arguments, what
        self.done = threading.Event()
        self.dropped = False
        self.result: _T | None = None
        self.error: BaseException | None = None


class Workers(Generic[_T]):
    """Workers that take tasks in the order they are given.

    Args:
        function: what tasks call; with `processes`, pickled.
        finish: what becomes of its result, in a thread of this process.
        count: how many workers.
        processes: whether each has a process of its own.
        deadline: seconds that one task may take.
        restart: whether a process that died or hangs is started anew, and does its task again, once.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        finish: Callable[[Any], _T],
        *,
        count: int,
        processes: bool,
        deadline: float,
        restart: bool,
    ) -> None:
        self._deadline = deadline
        self._tasks: queue.SimpleQueue[Task[_T] | None] = queue.SimpleQueue()
        self._payload = Payload(function) if processes else None
        self._workers = [
            _Worker(number, Child(self._payload) if self._payload else None, function, finish, restart)
            for number in range(count)
        ]
        for worker in self._workers:
            worker.start(self._tasks)

    def submit(self, arguments: tuple[Any, ...], what: Callable[[], str]) -> Task[_T]:
        task: Task[_T] = Task(arguments, what)
        self._tasks.put(task)
        return task

    def result(self, task: Task[_T]) -> _T:
        """Wait for a task and return its result.

        Raises:
            WorkerError: its worker died or hangs.
            Exception: raised by the function.
        """
        self._wait(task)
        if task.error is not None:
            raise task.error
        assert task.result is not None
        return task.result

    def drop(self, tasks: Iterable[Task[_T]]) -> None:
        """Forget tasks; a worker finishes the one that it has begun."""
        for task in tasks:
            task.dropped = True

    def settle(self, tasks: Iterable[Task[_T]]) -> None:
        """Wait until dropped tasks are over.

        Raises:
            WorkerError: one hangs.
        """
        for task in tasks:
            self._wait(task)

    def close(self) -> None:
        """End all threads and processes. A thread that hangs can't be ended; it does not keep the process alive."""
        for _ in self._workers:
            self._tasks.put(None)
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            worker.join()
        if self._payload is not None:
            self._payload.close()

    def _wait(self, task: Task[_T]) -> None:
        while not task.done.wait(min(self._deadline, _LOOKS_EVERY)):
            for worker in self._workers:  # not only the task's: it may wait behind one that hangs
                worker.check(self._deadline)


class _Worker:
    """A thread, and the process that it hands its tasks to, if there is one."""

    def __init__(
        self,
        number: int,
        child: Child | None,
        function: Callable[..., Any],
        finish: Callable[[Any], Any],
        restart: bool,
    ) -> None:
        self._name = f"data-{number}"
        self._child, self._finish, self._restart = child, finish, restart
        self._function = child.call if child else function
        self._hangs = self._stopped = False
        self._task: Task[Any] | None = None
        self._since = 0.0
        """Time at which it began its task."""
        self._thread: threading.Thread | None = None

    def start(self, tasks: queue.SimpleQueue[Any]) -> None:
        self._thread = threading.Thread(target=self._serve, args=(tasks,), name=self._name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        if self._child is not None:
            self._child.stop()

    def join(self) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_STOPS_WITHIN)

    def check(self, deadline: float) -> None:
        """End the process if its task takes too long.

        Raises:
            WorkerError: the thread has no process, and can't be ended.
        """
        task = self._task
        if task is None or time.monotonic() < self._since + deadline:
            return
        if self._child is None:
            raise WorkerError(
                f"The worker thread {self._name} hangs: for {deadline:g} s (prefetch.deadline) it has been reading "
                f"{task.what()}. With prefetch.kind = 'processes' a worker that hangs can be ended."
            )
        self._hangs, self._since = True, time.monotonic()
        self._child.kill()

    def _serve(self, tasks: queue.SimpleQueue[Task[Any] | None]) -> None:
        while (task := tasks.get()) is not None:
            if task.dropped or self._stopped:
                task.done.set()
                continue
            self._since, self._task = time.monotonic(), task
            try:
                task.result = self._finish(self._do(task))
            except BaseException as error:  # raised again by whoever takes the result
                task.error = error
            self._task = None
            task.done.set()
            del task  # else its result would live until the next one comes
        if self._child is not None:
            self._child.stop()
            self._child.close()

    def _do(self, task: Task[Any]) -> Any:
        try:
            return self._function(*task.arguments)
        except DiedError as error:
            told = self._told(error, task)
            if not self._restart or self._stopped:
                raise WorkerError(told) from None
            log.warning("%s It is started anew.", told)
        self._since = time.monotonic()
        try:
            return self._function(*task.arguments)
        except DiedError as error:
            raise WorkerError(f"{self._told(error, task)} It was the second time.") from None

    def _told(self, error: DiedError, task: Task[Any]) -> str:
        how = "hung, and was ended" if self._hangs else f"died: {error}"
        self._hangs = False
        return f"The worker process {self._name} (pid {error.pid}) {how}, while it read {task.what()}."
