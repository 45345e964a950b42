"""The slice of a batch that a rank keeps."""

from __future__ import annotations

from dataclasses import replace

import torch

from forge_train import Batch, ConfigError

from .cut import cut_of, document_starts


def sliced(batch: Batch, rank: int, ranks: int) -> Batch:
    """A rank's positions of every sequence, with the position ids that they had and documents by where they begin.

    Raises:
        ConfigError: for a batch that can't be cut.
    """
    length = batch.inputs.shape[1]
    if length % (2 * ranks):
        raise ConfigError(
            f"parallel.cp = {ranks} cuts sequences into 2 × {ranks} chunks, which do not divide the {length} tokens of "
            "this batch."
        )
    if batch.axes_of("labels").sequence is None:
        raise ConfigError(
            f"parallel.cp = {ranks}: the labels of a batch have no positions, so that no rank could compare them with "
            "its slice of a sequence; set parallel.cp = 1."
        )
    starts = None if batch.document_ids is None else document_starts(batch.document_ids)
    cut = cut_of(starts, length, ranks)
    places = batch.position_ids
    if places is None:
        places = torch.arange(length).expand(len(batch.inputs), -1)
    whole = replace(batch, position_ids=places, document_ids=starts)
    return whole.slice("sequence", *cut.spans[rank])
