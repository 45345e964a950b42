"""The size of what a run is about to learn, told before the first step."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..format import format_length
from . import progress
from .documents import Documents
from .stages import part, sequences

if TYPE_CHECKING:
    from forge_train import Job

    from .held_out import Side
    from .rows import Pieces

MANY = 10
"""Epochs above which a run is warned: small sets are learned by heart long before."""
log = logging.getLogger("forge_train")


def tell_learned(
    name: str, unit: str, sides: Mapping[Side, Documents], pieces: Pieces, job: Job, group: int = 1
) -> None:
    """Say how much is learned, what is cut, dropped and held out, and how often the run goes through it.

    Args:
        name: of the plugin's section.
        unit: of what is counted, in the plural.
        sides: the documents.
        pieces: the rows of an epoch of training.
        job: of the run.
        group: documents of one unit.
    """
    documents, train = sides["train"], job.config.train
    lengths = documents.lengths()
    whole = lengths[pieces.document]
    cut = int((pieces.length < whole).sum())
    dropped = (documents.count - len(pieces.document)) // group
    tokens, learned = int(pieces.length.sum()), _learned(documents, pieces, whole)
    texts = "" if group == 1 else " in texts"
    left_out = [f"{cut:,} {'are' if group == 1 else 'texts are'} cut"] if cut else []
    left_out += [f"{dropped:,} are dropped"] if dropped else []
    lost = f"{' and '.join(left_out)} ({name}.long); " if left_out else "none is cut or dropped; "
    rows = len(pieces.row_ends)
    epochs = train.epochs or sequences(job) / rows
    times = f"{part(epochs)} epochs of {rows:,} rows"
    if train.epochs:
        times = f"{rows:,} rows an epoch; {format_length(epochs, job.steps)}"
    progress.tell(
        f"{name}: {len(pieces.document) // group:,} {unit} of {tokens:,} tokens{texts}, {learned:,} of them learned "
        f"({learned / max(tokens, 1):.1%}); the longest has {int(lengths.max(initial=0)):,} tokens; {lost}"
        f"{sides['validation'].count // group:,} more held out; {times} in this run"
    )
    if epochs > MANY:
        once = -(-train.total_steps // epochs)
        log.warning(
            "This run goes through its %s %s %.1f times, which is often enough to learn them by heart; "
            "one epoch is about %s%s.",
            f"{len(pieces.document) // group:,}",
            unit,
            epochs,
            format_length(0, int(once)),
            "" if train.epochs else " (train.steps)",
        )


def _learned(documents: Documents, pieces: Pieces, whole: NDArray[np.int64]) -> int:
    """Learned tokens of an epoch."""
    masks = ((one.trained, len(one.tokens)) for one in documents.shards)
    total = sum(size if mask is None else int(np.count_nonzero(mask)) for mask, size in masks)
    for document in np.setdiff1d(np.arange(documents.count), pieces.document).tolist():
        total -= _count(documents, *documents.span(document))
    for at in np.flatnonzero(pieces.length < whole).tolist():
        begin, stop = documents.span(int(pieces.document[at]))
        first = begin + int(pieces.start[at])
        after = min(first + int(pieces.length[at]) + 1, stop)  # the last label is the token after the piece
        total -= (_count(documents, begin, first + 1) if first > begin else 0) + _count(documents, after, stop)
    return total


def _count(documents: Documents, begin: int, stop: int) -> int:
    found = np.zeros(stop - begin, np.bool_)
    if len(found):
        documents.learned(begin, found)
    return int(found.sum())
