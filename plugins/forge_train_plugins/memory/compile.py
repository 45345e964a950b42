"""torch.compile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from forge_train import ConfigError, Phase, Plugin, Problem, Transform, hookimpl, section

if TYPE_CHECKING:
    from torch import nn

    from forge_train import Applied, Job, Span, SpanName, StepResult
    from forge_train.config import Config as RunConfig


class Compile(Plugin):
    """Compiles the units of the model one by one with torch.compile, and says how that went after the first step.

    Training runs compiled; evaluation and generation, whose shapes come and go, run eagerly unless what was compiled
    fits.
    """

    api = (1, 0)
    provides = ("compile",)
    layout = True

    @section
    class Config:
        backend: str = "inductor"
        """`inductor` generates kernels; `aot_eager` and `eager` only trace, to look for errors."""
        mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
        """Effort of inductor."""
        fullgraph: bool = False
        """Refuse a unit that can't be compiled as one graph."""
        dynamic: Literal["auto", "on", "off"] = "auto"
        """Symbolic shapes: auto once they change, on from the start, off never."""

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._summary: Any = None

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        if self.config.backend != "inductor" and self.config.mode != "default":
            yield Problem("compile.mode", f"is inductor's; it has no effect with backend = {self.config.backend!r}.")

    @hookimpl
    def parallelize(self, job: Job) -> Transform:
        return Transform(Phase.COMPILE, "compile", lambda part: self._apply(part, job))

    @hookimpl
    def around(self, span: SpanName, job: Job) -> Span | None:
        from ._compile import eager_where_new, many_units

        if span == "forward_backward":
            return lambda: many_units(self._summary.units if self._summary else 0)
        return eager_where_new if span == "evaluate" else None

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        if self._summary is not None:
            self._summary.tell(step.step)

    def _apply(self, part: nn.Module, job: Job) -> Applied:
        from forge_train import Applied

        from ._compile import Summary, compile_unit

        units: tuple[str, ...] = tuple(getattr(part, "units", ()))
        if not units and job.dist.layout.pp > 1:  # a part with the embedding or the head alone
            return Applied(part)
        if not units:
            raise ConfigError(f"compile: the model ({type(part).__name__}) declares no units to compile.")
        config = self.config
        for name in units:
            compile_unit(
                part.get_submodule(name),
                backend=config.backend,
                mode=config.mode,
                fullgraph=config.fullgraph,
                dynamic={"auto": None, "on": True, "off": False}[config.dynamic],
            )
        self._summary = self._summary or Summary()
        self._summary.units += len(units)
        return Applied(part, units, f"{config.backend}, {len(units)} units")
