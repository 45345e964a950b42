"""Tokens that are read and never written."""

from __future__ import annotations

from collections.abc import Sequence

from forge_train import Batch, ConfigError


def unlearned(batches: Sequence[Batch], vocabulary: int) -> Sequence[Batch]:
    """The micro-batches, if the head has all of their labels: beyond it, a loss is undefined on some devices.

    Args:
        batches: with masked labels, before they are cut.
        vocabulary: number of the head's ids.
    """
    for batch in batches:
        if not batch.labels.is_floating_point() and (largest := int(batch.labels.max())) >= vocabulary:
            raise ConfigError(
                f"decoder.placeholders: the data has the token {largest} to learn, which stands for an item and is "
                "read and never written; take it out of the texts, or train on records with their items."
            )
    return batches
