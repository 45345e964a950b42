"""Tokens that are guessed before they are chosen: how many, by whom, and how many were right."""

from __future__ import annotations

from dataclasses import dataclass

from forge_train.contract.model import Model
from forge_train.plugin.job import Job

from . import drafting, lookup
from .forwards import Forwards
from .guessing import Guessing
from .sampling import Sampling


@dataclass
class Drafts:
    """Numbers of tokens to guess at once, one of which is 0, and counts of guessed and accepted tokens."""

    tokens: int = 0
    """By the modules of the model's tail."""
    lookup: int = 0
    """From the text itself, at most."""
    proposed: int = 0
    """Guessed tokens."""
    accepted: int = 0
    """Guessed tokens that were chosen too."""

    def __bool__(self) -> bool:
        return self.tokens > 0 or self.lookup > 0

    def count(self, proposed: int, accepted: int) -> None:
        self.proposed += proposed
        self.accepted += accepted

    def memory(self, job: Job, model: Model, forwards: Forwards, places: int, capacity: int) -> Guessing:
        """Memory of rows with guesses.

        Args:
            job: its task computes the logits.
            model: one that `drafts_of` accepts.
            forwards: of the model.
            places: most rows side by side.
            capacity: length of the longest row so far.
        """
        if self.tokens:
            return drafting.memory(job, model, forwards, self.tokens, places, capacity)
        return lookup.memory(job, model, self.lookup, places, capacity)

    def __str__(self) -> str:
        return f"{self.accepted:,} of {self.proposed:,} drafts accepted"


def drafts_of(job: Job, model: Model, sampling: Sampling) -> Drafts:
    """Drafts as a rule asks for them; every rank of a layout calls this.

    Raises:
        ConfigError: the model can't do that; explains why, on all ranks.
    """
    if sampling.drafts:
        drafting.check(job, model, sampling.drafts)
    if sampling.lookup:
        lookup.check(job, model, sampling.lookup)
    return Drafts(sampling.drafts, sampling.lookup)
