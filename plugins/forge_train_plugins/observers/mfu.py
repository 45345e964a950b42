"""Model FLOPs utilisation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from forge_train import CheckpointEvent, Job, Model, Plugin, Span, SpanName, StepResult, hookimpl


class MFU(Plugin):
    """Logs `mfu`: the model's FLOPs per second as a share of the peak of all devices.

    FLOPs are those that the model declares (`flops_per_token`). The peak is that of dense matrix products in
    `train.precision`: `log.peak_tflops` sets it, else the exact name of the device decides. Where either is unknown, as
    on a CPU, `mfu` is null. Evaluations and checkpoints are left out of the time.
    """

    api = (1, 0)
    layout = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._job: Job | None = None
        self.share = 0.0
        """FLOPs of a token over FLOP/s of all devices; 0 if either is unknown."""
        self._since: float | None = None
        self._tokens = 0

    @hookimpl
    def on_start(self, job: Job, model: Model) -> None:
        from forge_train_kit.peaks import device_peak

        self._job = job
        stages = job.dist.gather_stages(model.flops_per_token(job.config.train.sequence))
        flops = sum(one for one in stages if one) if all(stages) else 0
        peak = device_peak(job) * job.dist.world if flops else 0.0
        self.share = flops / peak if peak else 0.0

    @hookimpl
    def around(self, span: SpanName) -> Span | None:
        return self._left_out if span in ("evaluate", "save") else None

    @hookimpl
    def on_checkpoint(self, event: CheckpointEvent) -> None:
        if event.kind == "loaded":
            self._since = None

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        if self._job is None:
            return
        train = self._job.config.train
        if self._since is None:
            self._since, self._tokens = time.perf_counter() - step.seconds, 0
        self._tokens += train.batch_at(step.step - 1) * train.sequence
        if self._job.logs(step.step):
            step.loss.item()  # waits for the device
            now = time.perf_counter()
            rate = self._tokens / max(now - self._since, 1e-9)
            step.add("mfu", rate * self.share if self.share else None, timing=True)
            self._since, self._tokens = now, 0

    @contextmanager
    def _left_out(self) -> Iterator[None]:
        """Leave the time of the block out."""
        began = time.perf_counter()
        try:
            yield
        finally:
            if self._since is not None:
                self._since += time.perf_counter() - began
