"""Freezing a part of the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from forge_train import Phase, Plugin, Problem, Transform, hookimpl, section

if TYPE_CHECKING:
    from forge_train import Job


class Freeze(Plugin):
    """Trains a part of the model: parameters whose names match a pattern get no gradients and no optimizer state.

    Checkpoints hold them still, unless `checkpoint.only` leaves them out.
    """

    api = (1, 0)
    provides = ("freeze",)
    conflicts = ("lora",)
    facts = {"plan.per_unit": True, "check.example": ("freeze.parameters=['*weight']", "freeze.but=['head.*']")}

    @section
    class Config:
        parameters: tuple[str, ...] = ()
        """Patterns of names of parameters to freeze, such as `embedding.*`, with `*`, `?` and `[…]` as in a shell. `*`
        matches dots too. Each must match one."""
        but: tuple[str, ...] = ()
        """Patterns of those among them to train all the same: `parameters = ["*"]` and `but = ["head.*"]` train the
        head alone. Each must match one."""

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._names: Any = None

    @hookimpl
    def check_config(self) -> Iterator[Problem]:
        if not self.config.parameters:
            yield Problem("freeze.parameters", 'names nothing; set it, as in ["embedding.*"].')

    @hookimpl
    def parallelize(self, job: Job) -> Transform:
        from ._freeze import Names

        self._names = Names(self.config, job)
        return Transform(Phase.ADAPT, "freeze", self._names.apply)

    @hookimpl
    def on_start(self) -> None:
        self._names.check()
