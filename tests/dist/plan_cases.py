"""What the ranks really hold and send in a step, for `forge plan` to be compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import profile

from forge_train import Job, Model, Plugin, Update, hookimpl
from forge_train.contract.protocols import Span, SpanName
from forge_train_tools.planning.communication import Collective, Collectives, Names
from forge_train_tools.testing.runs import run_forge


class Meter(Plugin):
    """Measures steps after the first: the optimizer has its state by then."""

    api = (1, 0)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.step = 0
        self.gradients = 0
        self.peaks: list[int] = []
        """How long gloo's threads hold on to a tensor is a matter of chance: the least of them is the step's own."""
        self.sent: dict[str, list[float]] = {}

    @hookimpl
    def on_start(self, job: Job, model: Model, optimizer: torch.optim.Optimizer) -> None:
        self.job, self.model = job, model

    @hookimpl
    def around(self, span: SpanName, job: Job) -> Span | None:
        return self._measured if span == "step" else None

    @contextmanager
    def _measured(self) -> Iterator[None]:
        self.step += 1
        if self.step == 1:
            yield
            return
        self.sent, names = {}, Names(self.job.dist)

        def tell(one: Collective) -> None:
            if one.ranks > 1:
                counted = self.sent.setdefault(f"{one.kind} {names.of(one.group)}", [0, 0.0])
                counted[0] += 1
                counted[1] += one.sent

        with profile(profile_memory=True) as recorded, Collectives(tell):
            yield
        self.peaks.append(peak(recorded))

    @hookimpl
    def on_gradients(self, update: Update) -> None:
        self.gradients = sum(size(p.grad) for p in self.model.parameters() if p.grad is not None)


def peak(recorded: Any) -> int:
    """The most bytes that torch's allocator had given out at once, beyond those at the start."""
    events = recorded.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return int(max(accumulate(change for _, change in changes)))


def size(tensor: Tensor) -> int:
    mine = getattr(tensor, "_local_tensor", tensor)
    return mine.numel() * mine.element_size()


def measure(folder: str, plugins: Sequence[str], config: Mapping[str, Any], preset: str = "tiny") -> dict[str, Any]:
    """Several steps where the peak counts, one where bytes that never change are counted."""
    steps = 4 if preset == "quickstart" else 2
    run = run_forge(
        (*plugins, Meter),
        config,
        without=without(preset, plugins),
        steps=steps,
        folder=Path(folder),
        preset=preset,
        name="run",
    )
    meter: Meter = run.plugin("meter")
    state = [value for held in run.optimizer.state.values() for value in held.values() if isinstance(value, Tensor)]
    buffers = {id(buffer): buffer for part in run.model.parts for buffer in part.buffers()}
    return {
        "parameters": sum(size(parameter) for parameter in run.model.parameters()),
        "buffers": sum(size(buffer) for buffer in buffers.values()),
        "gradients": meter.gradients,
        "optimizer": sum(size(value) for value in state),
        "peak": min(meter.peaks),
        "sent": meter.sent,
    }


def without(preset: str, plugins: Sequence[str] = ()) -> tuple[str, ...]:
    beside = ("text",) if "multimodal" in plugins else ()
    return ("sample", *beside) if preset == "quickstart" else beside
