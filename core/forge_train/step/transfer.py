"""Batches on their way to the device."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from ..contract.batch import Batch
from ..mesh.tensors import remember_host


class Transfer:
    """Copies batches to the device. On CUDA this happens on a stream of its own: the host prepares a step while the
    device is at work on the one before, so copies from pinned memory run beside that work and not after it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __call__(self, batches: Iterable[Batch]) -> list[Batch]:
        if self._stream is None:
            return self._moved(batches)
        with torch.cuda.stream(self._stream):
            moved = self._moved(batches)
        compute = torch.cuda.current_stream(self._device)
        compute.wait_stream(self._stream)
        for batch in moved:
            batch.map(partial(_record, compute))  # its memory belongs to the other stream, which does not see the step
        return moved

    def _moved(self, batches: Iterable[Batch]) -> list[Batch]:
        """Tensors that several batches share stay shared: what is the same in all of a step is known to be."""
        known: dict[int, Tensor] = {}

        def move(tensor: Tensor) -> Tensor:
            if id(tensor) not in known:
                if self._stream is not None and tensor.device.type == "cpu" and not tensor.is_pinned():
                    tensor = tensor.pin_memory()  # made since the loader; the copy would wait for the device
                known[id(tensor)] = tensor.to(self._device, non_blocking=True)
            return known[id(tensor)]

        made = []
        for batch in batches:
            made.append(batch.map(move))
            if batch.document_ids is not None and made[-1].document_ids is not None:
                remember_host(made[-1].document_ids, batch.document_ids)
        return made


def _record(stream: torch.cuda.Stream, tensor: Tensor) -> Tensor:
    tensor.record_stream(stream)
    return tensor
