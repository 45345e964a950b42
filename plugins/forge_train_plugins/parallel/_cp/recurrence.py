"""A recurrence over sequences that are cut: ranks have whole sequences of some heads each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forge_train_kit.layers import Recurrence
from forge_train_kit.model import rows_are_whole

from .kernel import Ranks
from .moving import HeadsForSequence, SequenceForHeads


class ContextRecurrence:
    """A module's `recurrence`, and around it what it takes to see whole sequences; see `forge_train.Recurrence`.

    Args:
        recurrence: computes.
        ranks: that cut sequences, all of which exchange heads.
    """

    def __init__(self, recurrence: Recurrence, ranks: Ranks) -> None:
        self.recurrence, self.ranks = recurrence, ranks

    @torch.compiler.disable(reason="what lies where depends on a batch's documents")  # type: ignore[untyped-decorator,no-untyped-call]
    def __call__(self, *inputs: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """Of slices, a slice; of whole rows, whole rows. Not compiled."""
        if rows_are_whole():
            return self.recurrence(*inputs, document_ids=document_ids)
        group = self.ranks.heads
        sequences = self.ranks.sequences(document_ids, inputs[0].shape[1], inputs[0].device)
        how = sequences.of_heads
        wholes = HeadsForSequence.apply(how, group, *inputs)  # type: ignore[no-untyped-call]
        found: Any = self.recurrence(*wholes, document_ids=sequences.starts, part=(group.rank, group.size))
        (out,) = SequenceForHeads.apply(how, group, found)  # type: ignore[no-untyped-call]
        return out  # type: ignore[no-any-return]
