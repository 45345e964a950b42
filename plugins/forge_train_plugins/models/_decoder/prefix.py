"""Prefixes of documents: what comes before the first learned token, and sees all of itself."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from forge_train import MASKED, Axes, Batch, ConfigError

log = logging.getLogger("forge_train")

EXTRA = "prefix_ends"
"""The extra of a batch with the end of each token's prefix, `[batch, sequence]`, as in `AttentionOptions`."""


class Ends:
    """Adds the ends of prefixes to batches.

    Args:
        tell: whether to warn, once, of a document that goes on after an answer: its prefix ends before the first one,
            and a prompt that goes on so is a prefix as a whole.
    """

    def __init__(self, *, tell: bool) -> None:
        self._tell = tell

    def __call__(self, batches: Sequence[Batch]) -> list[Batch]:
        if self._tell and any(map(goes_on, batches)):
            self._tell = False
            log.warning(
                "decoder.prefix: a document goes on after an answer. Tokens after its first answer see only those "
                "before them in training, but each other in the prompt of a later answer: make each answer the end of "
                "a document of its own, as sft.each_turn does."
            )
        return [*map(with_ends, batches)]


def goes_on(batch: Batch) -> bool:
    """True if something is learned, something not, and something again in a document."""
    learned = batch.labels != MASKED
    if learned.ndim < 2 or learned.shape[1] < 2:
        return False
    starts = learned[:, 1:] & ~learned[:, :-1]  # not counting a row's first position, which nothing precedes
    earlier = learned[:, :-1].cumsum(1)
    if (ids := batch.document_ids) is not None:
        begins = torch.ones_like(learned)
        begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
        before = learned.cumsum(1) - learned.long()
        earlier = earlier - torch.where(begins, before, 0).cummax(1).values[:, 1:]
    return bool((starts & (earlier > 0)).any())


def with_ends(batch: Batch) -> Batch:
    """The batch with the ends of its prefixes, from whole rows: a slice does not have the labels of others.

    Raises:
        ConfigError: labels are not those of tokens.
    """
    if batch.labels.shape != batch.inputs.shape:
        raise ConfigError(
            f"decoder.prefix: a prefix ends at the first token that is learned, but labels are "
            f"{list(batch.labels.shape)}, and tokens {list(batch.inputs.shape)}; set it to false."
        )
    ends = prefix_ends(batch.labels, batch.document_ids)
    return replace(batch, extras={**batch.extras, EXTRA: ends}, axes={**batch.axes, EXTRA: Axes(0, 1)})


def prefix_ends(labels: Tensor, document_ids: Tensor | None) -> Tensor:
    """The ends of the prefixes of tokens, `[batch, sequence]` int64; 0 for a token after it.

    Args:
        labels: the token to learn after each position; the first one that is not masked follows the prefix of its
            document. A document without any has none: what follows it may be padding.
        document_ids: as in a batch; None for rows of one document.
    """
    learned, length = labels != MASKED, labels.shape[1]
    begins = torch.zeros_like(learned)
    begins[:, 0] = True
    if document_ids is not None:
        begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    before = learned.cumsum(1) - learned.long()  # learned at earlier positions of the row
    at_begin = torch.where(begins, before, 0).cummax(1).values
    after = torch.arange(1, length + 1, device=labels.device)
    ends, lasts = (
        torch.where(stops, after, length + 1).flip(1).cummin(1).values.flip(1)
        for stops in (learned, begins.roll(-1, 1))
    )
    return torch.where((before == at_begin) & (ends <= lasts), ends, 0)


def for_layers(items: dict[str, Tensor], x: Tensor, cache: Mapping[str, Any] | None) -> dict[str, Tensor]:
    """Take the ends of prefixes out of the extras of a batch, as keyword arguments of its layers.

    A text that begins a cache is a prefix: it is asked about. What follows it comes token by token.

    Args:
        items: extras of the batch.
        x: token ids or hidden states, `[batch, sequence, …]`.
        cache: of the text.

    Raises:
        ConfigError: nothing says where the prefix of a text ends.
    """
    if (given := items.pop(EXTRA, None)) is not None:
        return {EXTRA: given}
    batch, length = x.shape[:2]
    if length == 1:
        return {}
    held = next(iter(cache.values())) if cache else None
    if held is None or getattr(held, "length", 0) > 0:
        raise ConfigError(
            "decoder.prefix: nothing says where the prefix of this text ends. Batches say it by their labels, and a "
            "prompt is read at once into a cache, which needs attention with one and a kernel with offsets."
        )
    return {EXTRA: torch.full((batch, length), length, device=x.device)}
