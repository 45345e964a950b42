"""Work in the background of training, by all processes of a run together."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from forge_train.mesh.distributed import DistributedContext

_T = TypeVar("_T")
NICENESS = 10
"""Of the task's threads: training goes first where there are fewer cores than threads."""


class Background(Generic[_T]):
    """One task, begun at once. Every process runs its part of it, and all see it end at the same step boundary."""

    def __init__(self, task: Callable[[], _T], dist: DistributedContext) -> None:
        """Begin.

        Args:
            task: what to run; what it gathers and reduces goes over another group (`beside`).
            dist: the processes, as the thread of the caller sees them.
        """
        self._task = task
        self._result: list[_T] = []
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._everybody = dist.poll(everybody=True)
        threading.Thread(target=self._run, name="forge-checkpoint", daemon=True).start()

    def _run(self) -> None:
        try:
            if sys.platform == "linux":  # where a thread has one of its own, and hands it on to those that it begins
                here = os.PRIO_PROCESS, threading.get_native_id()
                os.setpriority(*here, max(os.getpriority(*here), NICENESS))
            self._result.append(self._task())
        except BaseException as error:  # which the thread that waits for the result raises
            self._error = error
        finally:
            self._done.set()  # the thread lives a moment longer, in which it would seem to work still

    def ended(self) -> bool:
        """Return True if every process was done at the previous call. All processes call this; none waits."""
        return self._everybody(self._done.is_set())

    def result(self) -> _T:
        """Wait for this process's part, and give its result, or raise what it failed with."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result[0]


@contextmanager
def beside(context: DistributedContext) -> Iterator[DistributedContext]:
    """The same processes with a group of their own, for another thread: two threads must not share a group. It has no
    meshes, and gathers and reduces on the CPU."""
    if context.world == 1:
        yield context
        return
    group = dist.new_group(backend="gloo")
    try:
        yield replace(context, device=torch.device("cpu"), _meshes={}, group=group)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group(group)
