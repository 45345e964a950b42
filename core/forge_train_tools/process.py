"""This process while a tool works in it: one tool at a time, and afterwards as it was before."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from forge_train.base.errors import ForgeError

if TYPE_CHECKING:
    from forge_train.plugin.job import Job
    from forge_train.registry.setup import Setup
    from forge_train.run.run import Run

_busy = threading.Lock()


@contextmanager
def alone() -> Iterator[None]:
    """Keep others from working in this process while the block lasts: random numbers and torch's switches are shared.

    Raises:
        ForgeError: if another thread, or a caller of this one, is at work.
    """
    if not _busy.acquire(blocking=False):
        raise ForgeError(
            "Forge is already at work in this process. Wait until that call returns, or start another process."
        )
    try:
        yield
    finally:
        _busy.release()


@contextmanager
def unchanged() -> Iterator[None]:
    """Give the block torch's default settings, and put random numbers, settings and the environment back after it."""
    import torch

    from forge_train.checkpoint.state import random_state, set_random_state

    before, environment = random_state(), dict(os.environ)
    deterministic, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    benchmark, dtype = torch.backends.cudnn.benchmark, torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark
        set_random_state(before)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)


@contextmanager
def prepared(setup: Setup, run: Run) -> Iterator[Job]:
    """A job on the processes of a run, prepared: for whoever does not train."""
    from forge_train.loop.assembly import joined, prepare_process
    from forge_train.plugin.job import Job

    with joined(setup) as dist:
        job = Job.of(setup.config, setup.hooks, run, dist)
        prepare_process(job)
        yield job
