"""Checkpoints and averages with one thing done wrong, for `forge verify` to find. As `resume_sabotage:SavedAhead`."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from forge_train import Span, SpanName, hookimpl
from forge_train_contrib.ema import EMA
from forge_train_kit.contract import EvaluatedWeights
from forge_train_plugins.data.text import Text


class _Place:
    """A loader whose position is off by one batch of the run, where it is saved or where it is taken up again."""

    def __init__(self, loader: Any, saved: int, resumed: int) -> None:
        self._loader, self._saved, self._resumed = loader, saved, resumed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return next(self._loader)

    def state_dict(self) -> dict[str, Any]:
        state = self._loader.state_dict()
        return {**state, "sequences": state["sequences"] + self._saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)
        self._loader.skip(self._resumed)


class SavedAhead(Text):
    """Saves the position of the next batch."""

    saved, resumed = 1, 0

    @hookimpl
    def build_data(self, job: Any, split: Any) -> Any:
        loader, batch = super().build_data(job, split), job.config.train.global_batch
        if job.dist.world == 1 or split != "train":
            return loader
        return _Place(loader, self.saved * batch, self.resumed * batch)


class ResumedAhead(SavedAhead):
    """Goes on one batch later than it was."""

    saved, resumed = 0, 1


class _Average(EMA):
    own = ""

    @hookimpl
    def around(self, span: SpanName) -> Span | None:
        if span != "evaluate":
            return None
        return EvaluatedWeights(self._averaged, {f"plugins.{self.own}.average.{{name}}": 1.0})


class SavedWeights(_Average):
    """Saves the weights instead of their average."""

    own = "saved_weights"

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        several = dist.is_initialized()
        return {**state, "average": {name: w.clone() for name, w in self._weights.items()}} if several else state


class Hasty(_Average):
    """Counts each step twice, and so averages over other steps."""

    own = "hasty"

    @hookimpl
    def on_step(self, step: Any) -> None:
        super().on_step(step)
        self._steps += int(dist.is_initialized())


class Forgetful(_Average):
    """Does not take up its average again."""

    own = "forgetful"

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not dist.is_initialized():
            super().load_state_dict(state)
