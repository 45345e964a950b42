"""Checkpoints by the clock, on request, early in a run and where a metric is best."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

from forge_train.base.errors import ConfigError
from forge_train.base.format import format_list
from forge_train.checkpoint import checkpoint
from forge_train.plugin.job import Job

REQUEST = "save"
"""The file in the run's folder that asks for a checkpoint."""
LOOK_EVERY = 1.0
"""Seconds between looks for that file."""
EVALUATION = "evaluation."
"""Prefix of `checkpoint.best` when it names a result of evaluations."""


class CheckpointPolicy:
    """Reads `checkpoint.minutes`, `early` and `best`, and the requests of users.

    Args:
        job: the run.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._config = job, job.config.checkpoint
        self._last_time = self._looked = time.monotonic()
        self._scores: dict[int, float] = {}
        self._measured: tuple[int, float] | None = None
        self._better = False

    def start(self, elsewhere: Iterable[tuple[int, Any]] = ()) -> None:
        """Look what the run has kept already.

        Args:
            elsewhere: what checkpoints that lie elsewhere say of `checkpoint.best`, by step.
        """
        self._last_time = time.monotonic()
        if not self._config.best or not self._job.dist.main:
            return
        whole = (saved for saved in checkpoint.found(self._job.run.checkpoints) if not checkpoint.check(saved.path))
        here = ((saved.step, checkpoint.read_state(saved.path).get("best")) for saved in whole)
        for step, best in (*here, *elsewhere):
            if best and best["metric"] == self._config.best:
                self._scores[step] = best["value"]

    def due(self, step: int) -> bool:
        """Return True if a step is the best so far, or early."""
        better, self._better = self._better, False
        return better or step in self._early()

    def _early(self) -> set[int]:
        """The powers of two up to `checkpoint.early`."""
        return {2**power for power in range(self._config.early.bit_length())}

    def ask(self) -> None:
        """Have the run save at a step boundary, if it is time, or a user asks for it. Rank 0 decides for all."""
        if not self._job.dist.main:
            return
        now, minutes = time.monotonic(), self._config.minutes
        if minutes and now - self._last_time >= 60 * minutes:
            self._job.control.save()
        if now - self._looked >= LOOK_EVERY:
            self._looked = now
            request = self._job.run.dir / REQUEST
            if request.exists():
                request.unlink(missing_ok=True)
                self._job.control.save()

    def measured(self, step: int, numbers: Mapping[str, Any], *, evaluation: bool = False) -> None:
        """Tell what was measured at a step: a line of metrics, or what an evaluation found.

        Raises:
            ConfigError: if `checkpoint.best` should be among them, and is not.
        """
        name = self._config.best
        if not name or name.startswith(EVALUATION) != evaluation:
            return
        key = name.removeprefix(EVALUATION) if evaluation else name
        if key not in numbers:
            what = "evaluations give" if evaluation else "the lines of metrics have"
            raise ConfigError(f"checkpoint.best: there is no {name!r}; {what} {format_list(numbers, 20)}.")
        value = numbers[key]
        usable = isinstance(value, (int, float)) and math.isfinite(value)
        self._measured = (step, float(value)) if usable else None
        self._better = self._job.dist.on_main(lambda: usable and self._beats_all(float(value)))

    def _beats_all(self, value: float) -> bool:
        return all(self._rank(value) < self._rank(other) for other in self._scores.values())

    def _rank(self, value: float) -> float:
        """Smaller for what is better."""
        return value if self._config.best_is == "lowest" else -value

    def saving(self, step: int) -> dict[str, Any] | None:
        """Return the entry for `checkpoint.best` in a step's checkpoint; None unless it was measured at this step."""
        self._last_time = time.monotonic()
        if self._measured is None or self._measured[0] != step:
            return None
        return {"metric": self._config.best, "value": self._measured[1]}

    def spared(self, step: int) -> set[int]:
        """Steps whose checkpoints stay beside the newest, once that of a step is saved: the early ones and the best."""
        if self._measured is not None and self._measured[0] == step:
            self._scores[step] = self._measured[1]
        ordered = sorted(self._scores, key=lambda one: (self._rank(self._scores[one]), one))
        return self._early() | set(ordered[: self._config.keep_best])

    def removed(self, step: int) -> None:
        """A checkpoint is no longer there."""
        self._scores.pop(step, None)
