"""Rows of documents that begin with prompts, which are not learned. As `prompted:Prompts`."""

from __future__ import annotations

from dataclasses import replace

import torch

from forge_train import MASKED, Batch, BatchPhase, Plugin, PrepareBatch, hookimpl


class Prompts(Plugin):
    """Cuts each row into documents, and takes the first of their tokens for prompts, of other lengths in each row."""

    api = (1, 0)

    @hookimpl
    def prepare_batch(self) -> PrepareBatch:
        return PrepareBatch(BatchPhase.MAKE, prompted)


def prompted(batch: Batch) -> Batch:
    """The batch with two documents in each row, whose prompts have as many tokens as their first ones say."""
    length = batch.inputs.shape[1]
    cut = length // 4 + batch.inputs[:, :1] % (length // 4)
    places = torch.arange(length)[None]
    second = (places >= cut).long()
    start = second * cut
    size = 1 + (batch.inputs.gather(1, start) + places * 0) % (length // 3)
    labels = batch.labels.masked_fill(places - start < size, MASKED).masked_fill(places + 1 == cut, MASKED)
    return replace(batch, labels=labels, document_ids=second, position_ids=places - start)
