"""One side of a corpus as a stream of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_train import ConfigError
from forge_train_kit import hookspecs
from forge_train_kit.data.documents import Documents
from forge_train_kit.data.rows import SplitRows
from forge_train_kit.data.shard import Shard
from forge_train_kit.data.stream import HELD_OUT_SEED, Ordered

from .corpus import Corpus

if TYPE_CHECKING:
    from forge_train import Job


def ordered(corpus: Corpus, side: str, job: Job, *, shuffle: bool, isolate: bool) -> Ordered:
    """The rows of one side of a corpus, in their order.

    Held-out rows come in an order that is shuffled once and for all runs alike, so that a few batches are a fair sample
    and every evaluation sees the same ones.

    Raises:
        ConfigError: there is not one whole sequence.
    """
    part, sequence = getattr(corpus, side), job.config.train.sequence
    if len(part.tokens) < sequence:
        which = "training" if side == "train" else "held-out"
        advice = "give it more text, or lower train.sequence" + (
            ", or raise text.held_out, or do not evaluate (train.evaluate_every = 0)" if side != "train" else ""
        )
        raise ConfigError(
            f"text.path: the {which} part of {corpus.name} has {len(part.tokens)} tokens, "
            f"and one sequence takes {sequence} (train.sequence): {advice}"
        )
    shard = Shard(corpus.folder, part.tokens, part.ends)
    documents = Documents([shard], corpus.key, vocabulary=hookspecs.tokenizer(job).vocabulary)
    rows = SplitRows(documents, sequence, isolate=isolate)
    seed = HELD_OUT_SEED if side == "validation" else job.seed if shuffle else None
    return Ordered(rows, seed, key="text", fixed=side == "validation")
