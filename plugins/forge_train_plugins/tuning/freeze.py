"""Freezing a part of the model, for the whole run or for its beginning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from forge_train import Gt, Phase, Plugin, Problem, Transform, hookimpl, section

if TYPE_CHECKING:
    import torch

    from forge_train import CheckpointEvent, Job, Model, StepResult
    from forge_train.config import Config as RunConfig


@section
class Thaw:
    """Frozen parameters whose names match a pattern, and when they thaw: an item of `thaw`."""

    match: str
    """Names, with `*`, `?` and `[…]` as in a shell: `layers.1.*`. `*` matches dots too."""
    steps: Annotated[int, Gt(0)] | None = None
    """Steps that they stay frozen: with 100, step 101 is the first to train them."""
    tokens: Annotated[float, Gt(0)] | None = None
    """The same in tokens of the whole run, rounded to whole steps."""

    def frozen_steps(self, config: RunConfig) -> int:
        """Number of steps that they stay frozen."""
        return self.steps or round(config.train.steps_of(self.tokens or 0.0))


class Freeze(Plugin):
    """Trains a part of the model: parameters whose names match a pattern get no gradients and no optimizer state.

    Those that `thaw` names are trained later in the run. They then start as at the first step of a run: their state is
    empty and counts its own steps, while the learning rate is where the schedule has arrived.

    Checkpoints hold them still, unless `checkpoint.only` leaves them out.
    """

    api = (1, 0)
    provides = ("freeze",)
    conflicts = ("lora",)
    facts = {
        "plan.per_unit": True,
        "hf.tunes": True,
        "check.example": ("freeze.parameters=['*weight']", "freeze.but=['head.*']"),
    }

    @section
    class Config:
        parameters: tuple[str, ...] = ()
        """Patterns of names of parameters to freeze, such as `embedding.*`, with `*`, `?` and `[…]` as in a shell. `*`
        matches dots too. Each must match one."""
        but: tuple[str, ...] = ()
        """Patterns of those among them to train all the same: `parameters = ["*"]` and `but = ["head.*"]` train the
        head alone. Each must match one."""
        thaw: tuple[Thaw, ...] = ()
        """Frozen parameters to train later: `[{ match = "layers.1.*", steps = 100 }]`. Each pattern must match one
        that no other matches."""

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._names: Any = None

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        if not self.config.parameters:
            yield Problem("freeze.parameters", 'names nothing; set it, as in ["embedding.*"].')
        for thaw in self.config.thaw:
            if (thaw.steps is None) == (thaw.tokens is None):
                yield Problem("freeze.thaw", f"{thaw.match!r} needs either steps or tokens.")
                continue
            steps, total = thaw.frozen_steps(config), config.train.total_steps
            if not steps:
                yield Problem("freeze.thaw", f"{thaw.match!r} would thaw before the first step: it is never frozen.")
            elif total and steps >= total:
                yield Problem(
                    "freeze.thaw",
                    f"{thaw.match!r} would thaw after step {steps:,}, and the run ends at step {total:,}: it is always "
                    "frozen.",
                )

    @hookimpl
    def parallelize(self, job: Job) -> Transform:
        from ._freeze import Names

        self._names = Names(self.config, job)
        return Transform(Phase.ADAPT, "freeze", self._names.apply)

    @hookimpl
    def on_start(self, model: Model, optimizer: torch.optim.Optimizer) -> None:
        self._names.start(model, optimizer)

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        self._names.end(step.step)

    @hookimpl
    def on_checkpoint(self, event: CheckpointEvent) -> None:
        if event.kind == "loaded":
            self._names.done = event.step

    def state_dict(self) -> dict[str, Any]:
        """The steps that were done."""
        return {"steps": self._names.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._names.done = state["steps"]
