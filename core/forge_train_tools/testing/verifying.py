"""`forge verify` on ranks that are there already: many layouts, without a launch for each."""

from __future__ import annotations

import dataclasses
import shutil
from typing import Any

from forge_train.base.errors import ForgeError

from ..configuration.request import Request
from ..launching.causes import by_cause
from ..launching.launch import Ended, WorkerResult
from ..verification import Reference, Verdict, verify
from .pool import Pool, PoolError


class Verifier:
    """Verifies layouts on a pool's ranks; what one process gives is taken once for each request of a reference.

    Args:
        pool: the ranks.
        timeout: seconds until a layout counts as hanging.
    """

    def __init__(self, pool: Pool, timeout: float = 600.0) -> None:
        self._pool, self._timeout = pool, timeout
        self._known: dict[str, Reference] = {}

    def __call__(self, request: Request, nproc: int, *, steps: int = 5, reference: Request | None = None) -> Verdict:
        """As `forge verify`.

        Args:
            request: the configuration.
            nproc: number of ranks.
            steps: how many to take.
            reference: a configuration that must give the same on one process; by default the layout's own.

        Raises:
            ForgeError: as `forge verify` would tell it.
            PoolError: if a rank hangs.
        """
        known = self._reference(reference, steps) if reference else None
        return verify(request, nproc, steps=steps, start=self._start, reference=known)

    def _reference(self, request: Request, steps: int) -> Reference:
        key = f"{steps} {request}"
        if key not in self._known:
            self._known[key] = Reference.take(request, steps)
        return self._known[key]

    def _start(self, nproc: int, arguments: dict[str, Any]) -> None:
        try:
            replies = self._pool.run(take, nproc, timeout=self._timeout, keep=True, **arguments)
        except PoolError as error:  # one that failed says why; others may wait for its messages without end
            replies = list(error.values)
            if all(not one["code"] or one["kind"] == "lost" for one in replies):  # nobody that is left knows why
                raise
        outcomes = [WorkerResult(**one) for one in replies]
        ended = Ended(by_cause(outcomes))
        try:
            ended.check()
        except ForgeError:
            shutil.rmtree(arguments["folder"], ignore_errors=True)
            raise


def take(**arguments: Any) -> dict[str, Any]:
    """Run one rank's work, and return how it ended."""
    from forge_train.mesh.world import World
    from forge_train_kit.failures import kind

    from ..messages import explain
    from ..verification.record import worker
    from .joined import leave

    rank = World.here().rank
    try:
        worker(**arguments)
        outcome = WorkerResult(rank, 0)
    except Exception as error:
        code = error.code if isinstance(error, ForgeError) else 1
        outcome = WorkerResult(rank, code, kind(error), explain(error))
    if outcome.code:
        leave()  # the others may wait for it; the error, whose traceback may hold groups, is gone by now
    return dataclasses.asdict(outcome)
