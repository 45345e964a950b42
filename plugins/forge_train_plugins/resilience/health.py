"""Checks that devices compute correctly and that ranks are equally fast."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from forge_train import ForgeError, Ge, Gt, Job, Plugin, StepResult, Volatile, hookimpl, section
from forge_train.contract.protocols import Span, SpanName

if TYPE_CHECKING:
    from forge_train_tools.links import Links

    from ._health import Share

log = logging.getLogger("forge_train")


class Health(Plugin):
    """Checks every rank at the start of a run and at intervals: known answers, speed, disk, clocks, devices.

    Each rank computes a matrix product and an all-reduce with known answers. If a rank gets one of them wrong, the run
    ends with an error that names it, before it can spoil a checkpoint. A slow rank, a rank that the others wait for
    during steps (by the time that each spends in collectives), a slow link between two machines, a nearly full disk,
    clocks that differ, and problems that NVML reports for a CUDA device (uncorrected memory errors, throttling; with
    `nvidia-ml-py` installed) are warnings. `forge doctor --nproc N` runs the same checks on one machine, without a run.
    """

    api = (1, 0)
    layout = True

    @section
    class Config:
        every: Annotated[int, Ge(0), Volatile()] = 1000
        """Steps between checks; 0 checks only at the start."""
        slow: Annotated[float, Gt(1), Volatile()] = 1.5
        """A rank is slow if it takes this many times the median of all ranks for the same product."""
        waited: Annotated[float, Gt(0), Volatile()] = 0.2
        """The others wait for a rank if it works in a larger part of the step than they do, by more than this. A rank
        works where it is not in a collective, by its device's clock if that is a CUDA device."""
        link: Annotated[float, Gt(1), Volatile()] = 3.0
        """A link between two machines is slow if it takes this many times the median of all links for the same bytes,
        now or in an earlier check of this run."""

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._job: Job | None = None
        self._share: Share | None = None
        self._links: Links | None = None

    @hookimpl
    def on_start(self, job: Job) -> None:
        self._job = job
        self._check(job, 0)
        if job.dist.world > 1 and self.config.every:
            from ._health import share_of

            self._share = share_of(job.device)

    @hookimpl
    def around(self, span: SpanName) -> Span | None:
        def shared() -> AbstractContextManager[None]:
            return self._share.step() if self._share else nullcontext()

        return shared if span == "step" else None

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        if self._job and self.config.every and step.step % self.config.every == 0:
            self._check(self._job, step.step)

    @hookimpl
    def on_end(self) -> None:
        if self._share:
            self._share.stop()

    def _check(self, job: Job, step: int) -> None:
        from forge_train_tools.health import look
        from forge_train_tools.links import Links

        found = look(job.dist, Path(job.run.dir), self.config.slow)
        self._links = self._links or Links(self.config.link)
        found += self._links.look(job.dist)
        if self._share:
            from ._health import compare

            shares = job.dist.gather_objects(self._share.take())
            found += compare(shares, job.dist.layout, self.config.waited)
        if broken := [one.text for one in found if one.status == "fail"]:
            raise ForgeError(f"health: {'; '.join(broken)}. Leave this machine out, and continue from a checkpoint.")
        for one in found if job.dist.main else ():
            if one.status == "warn":
                log.warning("health: %s", one.text)
                job.run.event("anomaly", step, kind=one.name, reason=one.text)
            else:
                log.info("health: %s: %s", one.name, one.text)
