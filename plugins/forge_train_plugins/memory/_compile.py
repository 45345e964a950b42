"""Compilation of one unit, and its report afterwards."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters

from forge_train import ConfigError
from forge_train.base.errors import nearest

log = logging.getLogger("forge_train")


def compile_unit(unit: nn.Module, *, backend: str, mode: str, fullgraph: bool, dynamic: bool | None) -> None:
    """Compile a module in place: it stays what it was, under the same names.

    Raises:
        ConfigError: for a backend that is not there.
    """
    known = torch._dynamo.list_backends(exclude_tags=())
    if backend not in known:
        raise ConfigError(
            f"compile.backend: {backend!r} is not one of {', '.join(sorted(known))}.{nearest(backend, known)}"
        )
    unit.compile(backend=backend, mode=None if mode == "default" else mode, fullgraph=fullgraph, dynamic=dynamic)


def many_units(units: int) -> AbstractContextManager[Any]:
    """Let every unit be compiled on its own. Units share their code, and torch stops compiling the same code again
    after some times, without an error."""
    limits = torch._dynamo.config
    patched: AbstractContextManager[Any] = limits.patch(
        recompile_limit=max(limits.recompile_limit, 4 * units + 8),
        accumulated_recompile_limit=max(limits.accumulated_recompile_limit, 16 * units + 256),
    )
    return patched


@contextmanager
def eager_where_new() -> Iterator[None]:
    """Run eagerly whatever has not been compiled yet."""
    with torch.compiler.set_stance(
        "eager_on_recompile"
    ):  # it holds from where it is made, not from where it is entered
        yield


class Summary:
    """Graphs and graph breaks since the run began."""

    def __init__(self) -> None:
        self.units = 0
        self._graphs, self._breaks, self._seconds = self._now()
        self._told = False

    def tell(self, step: int) -> None:
        """Log it, once."""
        if self._told:
            return
        self._told = True
        graphs, breaks, seconds = self._now()
        new = {reason: count - self._breaks.get(reason, 0) for reason, count in breaks.items()}
        new = {_first_line(reason): count for reason, count in new.items() if count > 0}
        if graphs == self._graphs:
            log.warning(
                "compile: torch.compile could compile none of the model's units, so the run trains uncompiled; "
                "`-s compile.fullgraph=true` names the code that it refuses."
            )
            return
        log.info(
            "compile: %d units in %d graphs with %d graph breaks, %.1f s of compiling until step %d",
            self.units,
            graphs - self._graphs,
            sum(new.values()),
            seconds - self._seconds,
            step,
        )
        for reason, count in sorted(new.items(), key=lambda pair: -pair[1])[:5]:
            log.warning("compile: %d × graph break: %s", count, reason)

    @staticmethod
    def _now() -> tuple[int, dict[str, int], float]:
        metrics: dict[str, list[float]] = torch._dynamo.utils.compilation_time_metrics
        seconds = sum(metrics.get("_compile.compile_inner", metrics.get("compile_inner", [])))
        return counters["stats"]["unique_graphs"], dict(counters["graph_break"]), seconds


def _first_line(reason: str) -> str:
    lines = [line.strip() for line in str(reason).splitlines() if line.strip()]
    return " ".join(lines[:2])
