"""Tasks on several processes. A worker that dies is named with what it read."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from forge_train import ConfigError
from forge_train.base.errors import describe

from ..tokenizers.pretrained import SERIAL
from .encoding import Maker
from .progress import Report
from .tasks import Preparation, Task
from .worker import perform, task_name

EVERY = 0.5
"""Seconds between two reports."""
ONE_CORE = {SERIAL: "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Environment of a worker: each has one core, and libraries would start a thread for each of the machine's."""

_mine: dict[str, Any] = {}
"""Of a worker process: its tokenizer and template, what it does, and the count of bytes that all of them share."""


def run(wanted: Preparation, tokenizer: str, tasks: list[Task], report: Report) -> None:
    """Do all tasks.

    Raises:
        ConfigError: what a task could not do, or that its worker died. What the others had under way is finished.
    """
    whole = wanted.whole(report.every)
    if wanted.workers == 1:
        maker = Maker.of(wanted, tokenizer)
        for task in tasks:
            _one(task, wanted, maker, whole, report.add)
            report.show()
        return
    context = multiprocessing.get_context("spawn")
    count = context.Value("q", 0)
    kept = {name: os.environ.get(name) for name in ONE_CORE}
    os.environ.update(ONE_CORE)
    try:
        with ProcessPoolExecutor(
            min(wanted.workers, len(tasks)), context, _start, (wanted, tokenizer, whole, count)
        ) as pool:
            _follow({pool.submit(_perform, task): task for task in tasks}, pool, count, report)
    finally:
        for name, value in kept.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _follow(running: dict[Future[None], Task], pool: ProcessPoolExecutor, count: Any, report: Report) -> None:
    waiting = set(running)
    while waiting:
        ended, waiting = wait(waiting, timeout=EVERY, return_when=FIRST_COMPLETED)
        report.at(count.value)
        for future in ended:
            try:
                future.result()
            except BrokenProcessPool as error:
                left = [running[one] for one in [future, *waiting]]
                first = min(left, key=lambda task: task.number)
                raise ConfigError(
                    f"A worker died, and with it task {task_name(first)} or one after it, which began to read "
                    f"{first.pieces[0].file.address}: was memory short? Run the same command again, with fewer "
                    "--workers; what is done stays."
                ) from error
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise


def end_with_parent() -> None:
    """Have this worker end when its parent does, even killed: it would wait for tasks for ever, and keep its memory."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _start(wanted: Preparation, tokenizer: str, whole: bool, count: Any) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told, and ends the pool
    _mine.update(wanted=wanted, maker=Maker.of(wanted, tokenizer), whole=whole, count=count)


def _perform(task: Task) -> None:
    def told(size: int) -> None:
        with _mine["count"].get_lock():
            _mine["count"].value += size

    _one(task, _mine["wanted"], _mine["maker"], _mine["whole"], told)


def _one(task: Task, wanted: Preparation, maker: Maker, whole: bool, told: Any) -> None:
    try:
        perform(task, wanted, maker, whole=whole, told=told)
    except OSError as error:
        raise ConfigError(
            f"--out: {wanted.out} can't be written ({error.strerror or describe(error)}). What is done stays: mend it "
            "and run the same command again."
        ) from None
