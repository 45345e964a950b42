"""Checks of what plugins return, for `make_setup`: of hooks, and of objects, functions and batches that hooks gave."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from forge_train.contract.batch import Batch
from forge_train.plugin.calls import EnabledPlugin
from forge_train.plugin.dispatch import Specs
from forge_train.plugin.inspection import Inspection, ReturnCheck
from forge_train.plugin.specs import HookSpec

from .fitting import check_fit
from .returns import found, kind_of, protocol_of, results, returned

if TYPE_CHECKING:
    import torch
    from torch import nn

    from forge_train.config import Config
    from forge_train.contract.model import Model

CONTEXT = ReturnCheck("a context manager", lambda value: "" if hasattr(type(value), "__exit__") else found(value))
"""Result of a function of `around`."""


def _first_batch() -> ReturnCheck:
    """A batch, of which the first is looked at field by field and axis by axis, and the others by their type."""
    kind, seen = kind_of(Batch), False

    def problem(value: Any) -> str:
        nonlocal seen
        if seen and isinstance(value, Batch):
            return ""
        seen = True
        if text := kind.problem(value):
            return text
        return f"found one that does not fit together: {wrong}" if (wrong := value.problem()) else ""

    return ReturnCheck(kind.words, problem)


def _several_batches() -> ReturnCheck:
    one = _first_batch()

    def problem(value: Any) -> str:
        if not isinstance(value, (list, tuple)):
            return found(value)
        return next((text for item in value if (text := one.problem(item))), "")

    return ReturnCheck("a list of Batch", problem)


class Returns(Inspection):
    """Checks by the annotations of hookspecs and protocols."""

    context = CONTEXT

    def before(self, parts: Sequence[nn.Module]) -> Any:
        from .invariants import Snapshot  # which imports torch

        return Snapshot.of(parts)

    def transformed(self, job: Any, *given: Any, frozen: bool) -> None:
        from .invariants import check_transformed

        check_transformed(job, *given, frozen=frozen)

    def check_optimizer(self, job: Any, model: Model, optimizer: torch.optim.Optimizer) -> None:
        from .invariants import check_optimizer

        check_optimizer(job, model, optimizer)

    def check_state(self, job: Any, model: Model, state: Mapping[str, Any]) -> None:
        from .invariants import check_alike

        check_alike(state, model, job.dist)

    def building(self, config: Config) -> AbstractContextManager[None]:
        from .invariants import addressable

        return addressable(config.sections)

    def check_fit(self, plugins: Sequence[EnabledPlugin], asked: Collection[str], specs: Specs) -> None:
        check_fit(plugins, asked, specs)

    def of(self, annotation: Any) -> ReturnCheck:
        return kind_of(annotation)

    def of_hook(self, spec: HookSpec[..., Any]) -> ReturnCheck:
        return returned(spec)

    def of_methods(self, spec: HookSpec[..., Any]) -> Mapping[str, ReturnCheck]:
        return results(protocol_of(spec)) if spec.checked else {}

    def of_batch(self) -> ReturnCheck:
        return _first_batch()

    def of_batches(self) -> ReturnCheck:
        return _several_batches()
