"""Inspection of plugins, as whoever enables them for a user brings it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ..base.errors import Problem
from .specs import HookSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..contract.model import Model
    from ..contract.transform import Applied


@dataclass(frozen=True)
class ReturnCheck:
    """Check that corresponds to an annotation."""

    words: str
    """`a torch.optim.Optimizer`."""
    problem: Callable[[Any], str]
    """Describes the value found instead (`found a list`); empty for a value that fits."""


ANYTHING = ReturnCheck("anything", lambda value: "")


class Inspection:
    """Looks at the classes of plugins, and at what they return; this base finds nothing wrong."""

    context: ClassVar[ReturnCheck] = ANYTHING
    """Check of a context manager, as a function of `around` makes it."""

    def mistakes(self, plugin: Any) -> Iterable[str]:
        """Mistakes in the class of an `EnabledPlugin`."""
        return ()

    def before(self, parts: Sequence[nn.Module]) -> Any:
        """Note what a transform must preserve of a model's parts."""

    def transformed(
        self,
        job: Any,
        plugin: str,
        who: str,
        before: Any,
        parts: Sequence[nn.Module],
        done: Sequence[Applied],
        retie: Callable[[], None],
        *,
        frozen: bool,
    ) -> None:
        """Check a transform's work on all parts.

        Args:
            job: the run.
            plugin: whose transform it was.
            who: plugin and slot, for messages.
            before: what `before` has noted.
            parts: those of the model now.
            done: what the transform reports.
            retie: ties parameters again, which must be done in any case.
            frozen: whether nothing of the model is trained.
        """
        retie()

    def check_optimizer(self, job: Any, model: Model, optimizer: torch.optim.Optimizer) -> None:
        """Check that an optimizer updates exactly the trainable parameters."""

    def check_state(self, job: Any, model: Model, state: Mapping[str, Any]) -> None:
        """Check that ranks hold the same of an optimizer's state, except for shards; all processes call this."""

    def building(self, config: Any) -> AbstractContextManager[Any]:
        """Return what is entered while a model is built."""
        return nullcontext()

    def check_fit(self, plugins: Sequence[Any], asked: Collection[str], specs: Mapping[str, Any]) -> None:
        """Check that task, head, loss and any other provider and consumer fit together.

        Args:
            plugins: the enabled ones.
            asked: slots that somebody has asked for. A default in an optional slot may never be asked for.
            specs: the hooks that the run knows.
        """

    def problems(self, config: Any) -> Iterable[Problem]:
        """Mistakes that only several values of the kernel's sections together show."""
        return ()

    def of(self, annotation: Any) -> ReturnCheck:
        """Check of a value by an annotation."""
        return ANYTHING

    def of_hook(self, spec: HookSpec[..., Any]) -> ReturnCheck:
        """Check of what a hook returns."""
        return ANYTHING

    def of_methods(self, spec: HookSpec[..., Any]) -> Mapping[str, ReturnCheck]:
        """Method of the object that a hook returns → check of what it returns at each call."""
        return {}

    def of_batch(self) -> ReturnCheck:
        """Check of batches, given one after the other."""
        return ANYTHING

    def of_batches(self) -> ReturnCheck:
        """Check of lists of batches, given one after the other."""
        return ANYTHING
