"""Explanation of errors for lack of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forge_train import Finished, Job, Model, Plugin, hookimpl

if TYPE_CHECKING:
    import torch


RESERVE = 4 << 20
"""Bytes that are set aside and let go of to explain a lack of memory, which takes some."""


class OutOfMemory(Plugin):
    """Explains a lack of memory: the requested size, this rank's memory by part, and what would help.

    Parts are parameters, gradients, the states of the optimizer, and activations, which stand for everything else.
    Advice names settings with the values to try, and installed plugins that make smaller what takes most of the memory
    (their fact `memory.saves`). Without the plugin, a run out of memory ends with torch's message.
    """

    api = (1, 0)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._besides = 0
        self._reserve: bytearray | None = bytearray(RESERVE)

    @hookimpl
    def on_start(self, job: Job, model: Model, optimizer: torch.optim.Optimizer) -> None:
        from ._out_of_memory import resident_besides

        self._besides = resident_besides(job.device, model, optimizer)

    @hookimpl
    def on_end(self, finished: Finished, job: Job) -> None:
        self._reserve = None
        if finished.error is None:
            return
        from ._out_of_memory import Report

        if explained := Report(finished, job, self._besides).error():
            finished.explain(explained)
