"""Batches on their way to the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..contract.batch import Batch


class Transfer:
    """Copies batches to the device. On CUDA this happens on a stream of its own: the host prepares a step while the
    device is at work on the one before, so copies from pinned memory run beside that work and not after it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __call__(self, batches: Iterable[Batch]) -> list[Batch]:
        if self._stream is None:
            return [batch.to(self._device) for batch in batches]
        with torch.cuda.stream(self._stream):
            moved = [batch.to(self._device) for batch in batches]
        compute = torch.cuda.current_stream(self._device)
        compute.wait_stream(self._stream)
        for batch in moved:
            for tensor in batch.tensors().values():
                tensor.record_stream(compute)  # its memory belongs to the other stream, which does not see the step
        return moved
