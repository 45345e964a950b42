"""Model FLOPs utilisation."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from forge_train import Batch, CheckpointEvent, Job, Model, Plugin, PrepareStep, Span, SpanName, StepResult, hookimpl


class MFU(Plugin):
    """Logs `mfu`: the model's FLOPs per second as a share of the peak of all devices.

    FLOPs are those that the model declares (`flops_per_token`), and those of the items that the steps had, such as
    images: of encoders, of connectors and of what attends to items. A frozen encoder has a forward pass alone, or none
    if what it gives is kept; other weights count whether they are frozen or not. The peak is that of dense matrix
    products in `train.precision`: `log.peak_tflops` sets it, else the exact name of the device decides. Where either is
    unknown, as on a CPU, `mfu` is null. Evaluations and checkpoints are left out of the time.
    """

    api = (1, 0)
    layout = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._job: Job | None = None
        self.share = 0.0
        """FLOPs of a token over FLOP/s of all devices; 0 if either is unknown."""
        self._peak = 0.0
        self._model: Model | None = None
        """If items are counted."""
        self._since: float | None = None
        self._tokens = 0
        self._takes_items = False
        self._of_items = 0
        """FLOPs of this rank's items, since then."""
        self._counts = True

    @hookimpl
    def on_start(self, job: Job, model: Model) -> None:
        from forge_train_kit.peaks import device_peak

        self._job = job
        stages = job.dist.gather_stages(model.flops_per_token(job.config.train.sequence))
        flops = sum(one for one in stages if one) if all(stages) else 0
        peak = device_peak(job) * job.dist.world if flops else 0.0
        self.share, self._peak = flops / peak if peak else 0.0, peak
        if self._takes_items and all(job.dist.gather_objects(bool(self.share))):
            self._model = model

    @hookimpl
    def prepare_batch(self, job: Job) -> PrepareStep | None:
        from forge_train_kit.enabled_modalities import enabled_modalities

        self._takes_items = bool(enabled_modalities(job))
        return PrepareStep(self._count) if self._takes_items else None

    @hookimpl
    def data_stages(self, job: Job) -> list[tuple[str, str]]:
        return []  # batches are only looked at

    @hookimpl
    def around(self, span: SpanName) -> Span | None:
        return self._left_out if span in ("evaluate", "save") else None

    @hookimpl
    def on_checkpoint(self, event: CheckpointEvent) -> None:
        if event.kind == "loaded":
            self._since, self._of_items = None, 0

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
            share = None
            if self.share:
                busy = self._tokens * self.share + self._flops_of_items(self._job) / self._peak
                share = busy / max(now - self._since, 1e-9)
            step.add("mfu", share, timing=True)
            self._since, self._tokens = now, 0

    def _count(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Count what the items of a step's micro-batches cost on this rank's parts."""
        from forge_train_kit.modalities import flops_of_items

        if self._counts and self._model is not None:
            parts = self._model.parts
            self._of_items += sum(flops_of_items(part, batch.extras) for part in parts for batch in batches)
        return batches

    def _flops_of_items(self, job: Job) -> float:
        """Of all ranks, since this was asked last; those of rows that several ranks share are counted once."""
        if self._model is None:
            return 0.0
        import torch

        mine, self._of_items = torch.tensor(float(self._of_items), dtype=torch.float64), 0
        return float(job.dist.all_reduce(mine)) * job.dist.data_ranks * job.dist.layout.stages / job.dist.world

    @contextmanager
    def _left_out(self) -> Iterator[None]:
        """Leave the time of the block out."""
        began = time.perf_counter()
        self._counts = False
        try:
            yield
        finally:
            self._counts = True
            if self._since is not None:
                self._since += time.perf_counter() - began
