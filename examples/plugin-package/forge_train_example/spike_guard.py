"""A veto: the event `on_gradients`. The plugin has a metric and a state."""

from __future__ import annotations

from typing import Annotated, Any

from forge_train import Gt, Lt, Plugin, StepResult, Update, hookimpl, section


class SpikeGuard(Plugin):
    """Skips a step whose gradient norm is far above what it has been."""

    api = (1, 0)

    @section
    class Config:
        factor: Annotated[float, Gt(0)] = 4.0
        """Steps with a gradient norm above this many times the mean are skipped."""
        decay: Annotated[float, Gt(0), Lt(1)] = 0.9
        """Share of the mean that a step keeps."""

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.mean = 0.0
        self.skipped = 0

    @hookimpl
    def on_gradients(self, update: Update) -> None:
        norm = float(update.grad_norm)  # waits for the device, once a step: the price of a veto
        if self.mean and norm > self.config.factor * self.mean:
            self.skipped += 1
            update.veto(f"gradient norm {norm:.3g} after {self.mean:.3g} on average")
        decay = self.config.decay if self.mean else 0.0
        self.mean = decay * self.mean + (1 - decay) * norm

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        step.add("skipped", self.skipped)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that decides about the next step."""
        return {"mean": self.mean, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.skipped = state["mean"], state["skipped"]
