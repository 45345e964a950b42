"""Work of modules that multiply at a peak of their own, such as that of float8."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from forge_train.compose.compose import Composition
from forge_train.plugin.job import Job

from ..facts import PEAK


def peaks_of(job: Job, composition: Composition) -> dict[str, str]:
    """Module of the only part → key of its peak, as the plugins state that transformed it."""
    (part,) = composition.model.parts
    modules = {name for name, _ in part.named_modules()}
    return {
        name: key
        for entry in composition.report
        if (key := PEAK.of(job.hooks.enabled[entry["plugin"]].cls))
        for name in entry["matched"]
        if name in modules
    }


class Apart:
    """Counts operations inside of some modules.

    A backward pass has no module around it: it takes the work of the forward pass once for the gradient of the input,
    and once more for that of the weights. Recomputation is a forward pass that is counted by itself.

    Args:
        part: of a model.
        peaks: name of a module → key.
    """

    def __init__(self, part: nn.Module, peaks: Mapping[str, str]) -> None:
        self.flops: defaultdict[str, float] = defaultdict(float)
        self._inside: list[tuple[str, int]] = []
        for name, key in peaks.items():
            self._watch(part.get_submodule(name), key)

    def _watch(self, module: nn.Module, key: str) -> None:
        def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
            recomputed = torch._C._current_graph_task_id() != -1
            trained = any(parameter.requires_grad for parameter in module.parameters())
            self._inside.append((key, 1 if recomputed else 2 + trained))

        def leave(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            self._inside.pop()

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)  # recomputation ends where it has what it needs

    def count(self, flops: float) -> None:
        """Add the operations of a kernel, if it runs inside of one of the modules."""
        if self._inside:
            key, times = self._inside[-1]
            self.flops[key] += flops * times
