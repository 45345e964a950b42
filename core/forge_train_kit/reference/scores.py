"""Log-probabilities of answers, by the model and by its reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from forge_train import Batch, Job

from ..model import answers_of, is_imagined, row_log_probabilities, without_updates
from .plugin import REFERENCE
from .stored import TARGET


@dataclass
class AnswerScores:
    """The base of tasks that compare the log-probability of whole answers with a reference's.

    Args:
        job: the run.
        config: a `ReferenceSection`.
        observed: gives the task's metrics, or None in a job without metrics.
        own_reference: whether the reference is the model without its updates, not a second one.
        moved: whether the model has scored an answer differently from its reference.
    """

    job: Job
    config: Any
    observed: Callable[[], Mapping[str, Any] | None]
    own_reference: bool = False
    moved: bool = False

    def compared(
        self, part: nn.Module, hidden: Tensor, batch: Batch, *, gathered: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The log-probability of each answer, its number of tokens (at least 1), and the log-probability less the
        reference's, or the same without a reference; all `[batch]`, or `[batch × answers]` where rows hold several
        pairs. For `gathered`, see `row_log_probabilities`.
        """
        sums, tokens = self._scores(part, hidden, batch, gathered)
        reference = self._reference(part, batch, gathered)
        relative = sums if reference is None else sums - reference
        if self.own_reference and not self.moved and not is_imagined(relative):
            self.moved = bool(relative.any())
        return sums, tokens.clamp(min=1), relative  # padding has no token

    def outputs(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        logits: Tensor = part.get_submodule("head")(hidden)
        return logits

    @torch.no_grad()
    def _reference(self, part: nn.Module, batch: Batch, gathered: bool) -> Tensor | None:
        """The reference's log-probability of each answer; None without a reference."""
        if (stored := batch.targets.get(TARGET)) is not None:
            return stored.flatten()
        if self.own_reference:
            with without_updates(part):
                return self._scores(part, part(batch.inputs, **batch.model_inputs()), batch, gathered)[0]
        if (reference := self.job.models.get(REFERENCE)) is None:
            return None
        hidden = reference(batch.inputs, **batch.model_inputs())
        return self._scores(reference.parts[-1], hidden, batch, gathered)[0]

    def _scores(self, part: nn.Module, hidden: Tensor, batch: Batch, gathered: bool) -> tuple[Tensor, Tensor]:
        head, more = part.get_submodule("head"), {"chunk": self.config.chunk, "gathered": gathered}
        return row_log_probabilities(hidden, head, batch.labels, self.job, **more, answers=answers_of(batch))
