"""Rows of a run's data, as its model and its task are given them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from forge_train.base.errors import ConfigError
from forge_train.contract.batch import MASKED, Batch
from forge_train.contract.protocols import Loader
from forge_train.plugin.job import Job
from forge_train.registry.setup import Setup
from forge_train.step.forward import close
from forge_train_kit import hookspecs
from forge_train_kit.data.inspection import Token
from forge_train_kit.data.inspection.samples import ShownItem, texts_of, with_items

from .opening import lone_job


@dataclass(frozen=True)
class Row:
    """A row; a token is learned if it is the label of the one before it.

    Args:
        learned: number of labels that count.
        labels: number of all labels.
        tokens: of the row, and its last label if that counts.
        padding: number of tokens left out at the end: the same token, never learned.
        items: in their order; the tokens have one at the positions of each.
    """

    learned: int
    labels: int
    tokens: tuple[Token, ...]
    padding: int
    items: tuple[ShownItem, ...] = ()


def rows(setup: Setup, count: int) -> list[Row]:
    """The first rows that one process would train on.

    Raises:
        ConfigError: for data that is no rows of tokens, and as the data's plugin does.
    """
    job = lone_job(setup, Path(), "cpu")
    loader, found = job.hooks.build_data("train"), list[Row]()
    try:
        while len(found) < count:
            found += _rows(next(loader), job, loader, len(found))
    finally:
        close(loader)
    return found[:count]


def _rows(batch: Batch, job: Job, loader: Loader, first: int) -> Iterator[Row]:
    if not _labels_are_tokens(batch):
        raise ConfigError(
            f"{job.hooks.whose('build_data')}: --sample shows rows of tokens whose labels are the next ones; these "
            "have others."
        )
    documents = batch.document_ids if batch.document_ids is not None else torch.zeros_like(batch.inputs)
    items_of = getattr(loader, "items", lambda number: ())
    given = batch.sample_ids
    numbers = range(first, first + len(batch.inputs)) if given is None else given.tolist()
    for at, (ids, labels, own) in enumerate(zip(batch.inputs, batch.labels, documents, strict=True)):
        items = tuple(
            part for source, one, position in items_of(numbers[at]) for part in ShownItem.of(source, one, position)
        )
        tokens = with_items(list(_tokens(ids, labels, own, job)), items)
        padding = 0
        while len(tokens) > 1 and tokens[-1] == tokens[-2] and not tokens[-1].learned:
            tokens.pop()
            padding += 1
        yield Row(int((labels != MASKED).sum()), len(labels), tuple(tokens), padding, items)


def _labels_are_tokens(batch: Batch) -> bool:
    inputs, labels = batch.inputs, batch.labels
    if inputs.ndim != 2 or labels.shape != inputs.shape or labels.is_floating_point():
        return False
    counts = labels[:, :-1] != MASKED
    return torch.equal(labels[:, :-1][counts], inputs[:, 1:][counts])


def _tokens(ids: Tensor, labels: Tensor, documents: Tensor, job: Job) -> Iterator[Token]:
    learned = [False, *(labels != MASKED).tolist()]
    last = labels[-1:] if learned[-1] else labels[:0]
    ends = [*(documents[1:] != documents[:-1]).tolist(), *[False] * (1 + len(last))]
    shown = torch.cat([ids, last]).tolist()
    texts = (
        texts_of(hookspecs.tokenizer(job), shown) if job.hooks.provider("tokenizer") else [(None, False)] * len(shown)
    )
    for id, text, known, end in zip(shown, texts, learned, ends, strict=False):
        yield Token(id, *text, known, end)
