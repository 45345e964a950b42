"""Activations changed by plugins while a model is evaluated, answers or is looked at: the hook `intervene`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from forge_train.base.errors import ConfigError, PluginError
from forge_train.contract.batch import Batch
from forge_train.contract.model import Model
from forge_train.plugin.job import Job

from ..hookspecs import intervene
from .layout import Layouts, Side
from .modules import matched_modules


@dataclass(frozen=True)
class Positions:
    """Rows and tokens that an intervention sees."""

    samples: Tensor | None
    """The number of each row's sequence in the stream of the data, `[rows]` int64; None if rows have none."""
    tokens: Tensor
    """Position of each token within its whole row, `[tokens]` int64: under context parallelism, of a slice."""


Edit = Callable[[Tensor, Positions | None], Tensor]
"""Values `[rows, tokens, …]` with all features, and what they are of, → values of the same shape. There are no
positions where text is generated."""


@dataclass(frozen=True)
class OfInput:
    """An edit of what a module is given, instead of what it gives."""

    edit: Edit

    def __call__(self, values: Tensor, positions: Positions | None) -> Tensor:
        return self.edit(values, positions)


class Interventions:
    """Changes that plugins make in one model. Use `of`, so that a model has one of them.

    Args:
        model: composed.
        job: its job.

    Raises:
        ConfigError: for a pattern that matches nothing.
    """

    def __init__(self, model: Model, job: Job) -> None:
        self._job, self._on = job, False
        self._batch: Batch | None = None
        answers = [(name, dict(found)) for name, found in intervene(model, job)]
        self._count = sum(len(edits) for _, edits in answers)
        if not self._count:
            return
        self._layouts = Layouts(model, job)
        for part in model.parts:
            part.register_forward_pre_hook(self._begin, with_kwargs=True)
        for plugin, edits in answers:
            whose = job.hooks.whose("intervene", plugin)
            for pattern, edit in edits.items():
                for name, module in matched_modules(model, job, [pattern], whose).items():
                    if isinstance(edit, OfInput):
                        module.register_forward_pre_hook(partial(self._on_input, whose, name, edit))
                    else:
                        module.register_forward_hook(partial(self._on_output, whose, name, edit))

    @classmethod
    def of(cls, model: Model, job: Job) -> Interventions:
        """Those of a model. Every rank must call it, the first time before the model is used."""
        found: Interventions | None = vars(model).get(_ATTRIBUTE)
        if found is None:
            found = vars(model)[_ATTRIBUTE] = cls(model, job)
        return found

    def __len__(self) -> int:
        """Number of changes."""
        return self._count

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A block in which the model computes with them. It needs no gradients: none pass between ranks."""
        before, self._on = self._on, True
        try:
            yield
        finally:
            self._on, self._batch = before, None

    # -- during a forward pass --------------------------------------------------------------------

    def _begin(self, part: nn.Module, args: Any, kwargs: Any) -> None:
        """A part is about to read tokens, or another part's states; text that is generated belongs to no batch."""
        if self._on:
            ids = kwargs.get("position_ids")
            ids = args[0] if ids is None or not args[0].is_floating_point() else ids
            self._batch = self._job.step.batch or Batch(ids, ids)

    def _on_input(self, whose: str, name: str, edit: Edit, module: nn.Module, args: Any) -> Any:
        if not self._on:
            return None
        if not args or not isinstance(args[0], Tensor):
            raise ConfigError(f"{whose}: {name!r} is not given a tensor by position, so its input can't be changed.")
        return (self._edited(whose, name, edit, args[0], "input"), *args[1:])

    def _on_output(self, whose: str, name: str, edit: Edit, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._on:
            return None
        if isinstance(output, Tensor):
            return self._edited(whose, name, edit, output, "output")
        if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
            return (self._edited(whose, name, edit, output[0], "output"), *output[1:])
        raise ConfigError(f"{whose}: {name!r} gives a {type(output).__name__}, and not a tensor that could be changed.")

    @torch.no_grad()
    def _edited(self, whose: str, name: str, edit: Edit, x: Tensor, side: Side) -> Tensor:
        """The tensor as this rank has it, changed."""
        batch = self._batch
        if batch is None:
            raise ConfigError(f"{whose}: {name!r} is called before the model has read a token.")
        full, back = self._layouts.full(name, x, batch, side)
        changed: Any = edit(full, self._positions(full))
        if not isinstance(changed, Tensor) or changed.shape != full.shape:
            found = list(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
            raise PluginError(f"{whose}: an edit of {name!r} must give {list(full.shape)}, found {found}.")
        return back(changed.to(full.dtype))

    def _positions(self, full: Tensor) -> Positions | None:
        batch = self._job.step.batch
        if batch is None:
            return None
        places = torch.arange(batch.inputs.shape[1]) if batch.positions is None else batch.positions
        return Positions(batch.sample_ids, places.to(full.device))


_ATTRIBUTE = "_interventions"
"""Of a model that has them."""
