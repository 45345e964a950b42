"""Greedy generation in which the modules of a model's tail draft tokens, and the model checks them in one pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from forge_train.base.errors import ConfigError
from forge_train.plugin import hookspecs
from forge_train.plugin.job import Job
from forge_train_kit import heads

from .logits import continues, logits_of, new_cache


@dataclass
class Drafts:
    """Counts of drafted and accepted tokens."""

    proposed: int = 0
    """Drafted tokens."""
    accepted: int = 0
    """Drafted tokens that the model chose too."""

    def __str__(self) -> str:
        return f"{self.accepted} of {self.proposed} drafts accepted"


def check(job: Job, part: nn.Module, drafts: int) -> None:
    """Check that a model can draft this many tokens at once.

    Raises:
        ConfigError: explaining why not.
    """
    own = getattr(part, "tail", None)
    if not isinstance(own, heads.Drafting):
        raise ConfigError("The model was trained without modules that predict further tokens; leave drafts out.")
    if drafts > own.depths:
        raise ConfigError(f"{drafts} drafts were requested; the model's modules can draft at most {own.depths} tokens.")
    if job.dist.world > 1:
        raise ConfigError("Drafts need the whole model in one process; leave them out.")
    if not all(hasattr(one, "crop") for one in _caches(part, own, job)):
        raise ConfigError(
            "This model can't undo wrong drafts: that needs attention with a cache of keys and values that can be "
            "cropped (forge_train_kit.model.KVCache), and a kernel that can continue from it. Leave drafts out."
        )


def _caches(part: Any, own: heads.Drafting, job: Job) -> Iterable[Any]:
    cache = new_cache(part, 1) if continues(job) else None
    return [None] if not isinstance(cache, dict) else [*cache.values(), *own.new_cache(1, 1)]


class Drafting:
    """Rounds of drafting and checking (arXiv:2211.17192, with greedy choice on both sides).

    At the start of a round the model has seen tokens 0 … n − 1 and chosen token n. Module k, from 0, drafts token
    n + 1 + k from the output of the module before it for the tokens up to n − 1. Then the model sees token n and the
    drafts.
    """

    def __init__(self, job: Job, part: Any, drafts: int, length: int, vocabulary: int, told: Drafts) -> None:
        """
        Args:
            job: its task computes the logits.
            part: the model.
            drafts: tokens to draft at once.
            length: largest number of tokens, including the prompt's.
            vocabulary: number of token ids to choose from.
            told: counts drafted and accepted tokens.
        """
        self._part = part
        self._tail: heads.Drafting = part.tail
        self._task, self._device = hookspecs.task(job), job.device
        self._drafts, self._length, self._vocabulary, self.told = drafts, length, vocabulary, told
        self._cache: dict[str, Any] = part.new_cache(1, length)
        self._caches = self._tail.new_cache(1, length)[:drafts]
        self._ids: list[int] = []
        """Tokens that are final."""
        self._given: list[Tensor | None] = [None] * (drafts + 1)
        """Inputs that each module has not processed yet, `[1, positions, dim]`, starting at the end of its cache."""

    def tokens(self, prompt: Sequence[int]) -> Iterator[int]:
        """The tokens after a prompt; ends only once there are `length` tokens."""
        self._ids = list(prompt)
        chosen = self._seen(prompt)[-1:]
        while True:
            self._ids += chosen
            yield from chosen
            room = self._length - len(self._ids) - 1  # besides the token that the model adds
            chosen = self._checked(self._guesses()[:room] if room > 0 else [])

    @torch.no_grad()
    def _seen(self, ids: Sequence[int]) -> list[int]:
        """Run the model on tokens; returns its choice after each."""
        hidden = self._part(torch.tensor([ids], device=self._device), cache=self._cache)
        self._keep(0, hidden)
        return self._choices(hidden)

    def _checked(self, guesses: list[int]) -> list[int]:
        """The next tokens: the drafts that the model would have chosen, and one more that it chooses."""
        known = len(self._ids)
        choices = self._seen([self._ids[-1], *guesses])
        right = next((at for at, guess in enumerate(guesses) if choices[at] != guess), len(guesses))
        self.told.proposed += len(guesses)
        self.told.accepted += right
        for cache in self._cache.values():
            cache.crop(known + right)
        self._forget(0, len(guesses) - right)
        return choices[: right + 1]

    @torch.no_grad()
    def _guesses(self) -> list[int]:
        known = len(self._ids) - 1  # tokens that the model has seen
        ids = list(self._ids)
        for depth, cache in enumerate(self._caches):
            hidden = self._given[depth]
            assert hidden is not None
            start = cache.length
            new = torch.tensor([ids[start + depth + 1 : known + depth + 1]], device=self._device)
            positions = torch.arange(start, known, device=self._device)[None]
            after, normed = self._tail.draft(depth, hidden, new, positions, cache)
            ids += self._choices(normed[:, -1:])
            self._keep(depth + 1, after)
            # The last positions may have processed a wrong draft: they are computed again in the next round.
            cache.crop(max(known - depth, 0))
            certain = self._caches[depth - 1].length if depth else cache.length
            self._given[depth] = hidden[:, cache.length - start : certain - start]
        self._given[-1] = None
        return ids[known + 1 :]

    def _choices(self, hidden: Tensor) -> list[int]:
        logits = logits_of(self._task, self._part, hidden, len(self._ids))
        found: list[int] = logits[:, : self._vocabulary].argmax(-1).tolist()
        return found

    def _keep(self, depth: int, hidden: Tensor) -> None:
        before = self._given[depth]
        self._given[depth] = hidden if before is None else torch.cat((before, hidden), dim=1)

    def _forget(self, depth: int, positions: int) -> None:
        kept = self._given[depth]
        if kept is not None and positions:
            self._given[depth] = kept[:, :-positions]
