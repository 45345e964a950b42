"""What makes the host wait for a tensor's value, counted while a run trains."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_train import Plugin, StepResult, hookimpl

READS = (
    "item",
    "tolist",
    "cpu",
    "numpy",
    "__float__",
    "__int__",
    "__bool__",
    "__index__",
    "__array__",
    "nonzero",
    "__len__",
)
"""What makes the host wait for a tensor's value. `__len__` does not, and is there to show that counting works."""
ALLOWED = {("weight", "next_token.py"), ("weight", "toys.py")}
"""Functions that read a batch which still lies on the CPU, by contract: `task.weight`."""


class Watch(Plugin):
    """Knows which step it is."""

    api = (1, 0)
    step = 0

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        type(self).step = step.step


@contextmanager
def counting(log_every: int) -> Iterator[Counter[Any]]:
    """Counts reads in steps that are not logged, after the first: (method, where it was called)."""
    found: Counter[Any] = Counter()
    Watch.step = 0

    def watched(name: str, real: Any) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            running = Watch.step + 1  # of the step that is under way
            if Watch.step >= 1 and running % log_every and Watch.step % log_every:
                frame = sys._getframe(1)
                places, place = [], f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                outer: Any = frame
                while outer is not None:
                    places.append((outer.f_code.co_name, Path(outer.f_code.co_filename).name))
                    outer = outer.f_back
                if not ALLOWED & set(places):
                    found[name, place] += 1
            return real(*arguments, **more)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in READS:
            patch.setattr(torch.Tensor, name, watched(name, getattr(torch.Tensor, name)))
        yield found


def waits(found: Counter[Any]) -> dict[Any, int]:
    return {place: count for place, count in found.items() if place[0] != "__len__"}
