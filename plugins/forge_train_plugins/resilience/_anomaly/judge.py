"""Detection of abnormal steps from two numbers that are equal on all ranks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

from forge_train_kit.outliers import limit

AnomalyKind = Literal["not_finite", "spike"]


@dataclass(frozen=True)
class Verdict:
    """Why a step is abnormal."""

    kind: AnomalyKind
    text: str


class Judge:
    """Compares each step with those before it.

    Args:
        threshold: robust z-score from which a number is a spike.
        window: steps to compare with.
        warmup: steps before the first comparison.
        keeps_spikes: whether a spike counts among the steps that later ones are compared with. It must where the run
            continues with it: a loss that has risen for good would be a spike for ever.
    """

    def __init__(self, threshold: float, window: int, warmup: int, *, keeps_spikes: bool) -> None:
        self._threshold, self._warmup, self._keeps = threshold, warmup, keeps_spikes
        self._numbers = {name: deque[float](maxlen=window) for name in ("loss", "gradient norm")}
        self._taken = 0
        self.in_row = 0
        """Abnormal steps in a row, up to the last one."""

    def step(self, loss: float | None, norm: float | None) -> Verdict | None:
        """Judge the next step; None as loss or norm stands for a non-finite value."""
        found = {"loss": loss, "gradient norm": norm}
        if broken := [name for name, value in found.items() if value is None]:
            are = "is" if len(broken) == 1 else "are"
            verdict: Verdict | None = Verdict("not_finite", f"the {' and the '.join(broken)} {are} not finite")
        else:
            verdict = self._spike({name: value for name, value in found.items() if value is not None})
        self.in_row = self.in_row + 1 if verdict else 0
        return verdict

    def _spike(self, found: dict[str, float]) -> Verdict | None:
        limits = {name: limit(before, self._threshold) for name, before in self._numbers.items() if before}
        over = [name for name, value in found.items() if self._taken >= self._warmup and value > limits[name]]
        if not over or self._keeps:
            for name, value in found.items():
                self._numbers[name].append(value)
            self._taken += 1
        if not over:
            return None
        words = (f"the {name} is {found[name]:.4g}, above {limits[name]:.4g}" for name in over)
        return Verdict("spike", " and ".join(words))

    def state_dict(self) -> dict[str, Any]:
        numbers = {name: list(values) for name, values in self._numbers.items()}
        return {"numbers": numbers, "taken": self._taken, "in_row": self.in_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, values in state["numbers"].items():
            self._numbers[name].clear()
            self._numbers[name].extend(values)
        self._taken, self.in_row = state["taken"], state["in_row"]
