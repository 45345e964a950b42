"""Descriptions of the stages of data plugins, for `forge data show`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from forge_train.base.format import format_bytes, format_list

from ..format import format_plural

if TYPE_CHECKING:
    from forge_train import Job

    from .documents import Documents
    from .files import File
    from .held_out import Side
    from .rows import Pieces

_PACKING = {
    "split": "all documents as one text, cut every {} tokens",
    "best_fit": "several whole documents in a row of {} tokens",
    "pad": "one document in a row of {} tokens",
    "buckets": "documents of like length in micro-batches of at most {} tokens",
}


def counted(files: Sequence[File]) -> str:
    """`3 files (3 .jsonl), 1.2 MiB`."""
    kinds = Counter(f".{file.suffix}" if file.suffix else file.name for file in files).most_common()
    size = format_bytes(sum(file.size() for file in files))
    return f"{format_plural(len(files), 'file')} ({format_list(f'{count:,} {kind}' for kind, count in kinds)}), {size}"


def sides(found: Mapping[Side, Documents]) -> str:
    """Describe the amount of data to train and to evaluate on."""
    train, held = found["train"], found["validation"]
    return f"{train.count:,} documents of {train.tokens:,} tokens, and held out {held.count:,} of {held.tokens:,}"


def held_out(share: float, how: str) -> str:
    return f"held out for evaluation: {share:.2%}, {how}" if share else "held out for evaluation: nothing"


def packed(packing: str, job: Job, *, isolate: bool, rows: int | None = None) -> str:
    """Describe the packing of documents into rows, and how far the rows last.

    Args:
        rows: of an epoch, if they are known without work.
    """
    how = _PACKING[packing].format(f"{job.config.train.sequence:,}")
    apart = "attention stays in a document" if isolate or packing == "buckets" else "attention crosses documents"
    return f"{how}; {apart}" + (f"; {passes(rows, job.config.train.epochs * rows or sequences(job))}" if rows else "")


def order(job: Job, *, shuffle: bool) -> str:
    return f"shuffled anew for every epoch, by seed {job.seed} and position" if shuffle else "as it lies in the files"


def passes(rows: int, needed: float) -> str:
    """Describe how often a run goes through its rows."""
    return f"{rows:,} sequences an epoch, {part(needed / rows)} epochs in this run"


def padding(pieces: Pieces, job: Job) -> str:
    """Describe how much of rows is padding, and how much it would be with one text in a row."""
    tokens, sequence = int(pieces.length.sum()), job.config.train.sequence
    now, alone = (1 - tokens / max(len(rows) * sequence, 1) for rows in (pieces.row_ends, pieces.document))
    return f"{now:.1%} of the rows is padding" + (f" ({alone:.1%} with one text in a row)" if now < alone else "")


def part(epochs: float) -> str:
    """A number of epochs; a small one is not rounded to 0."""
    return f"{epochs:.2f}" if epochs >= 0.1 else f"{epochs:.1g}"


def sequences(job: Job) -> int:
    """Sequences of the whole run, over all ranks."""
    train = job.config.train
    warm = sum(phase.steps for phase in train.batch_warmup)
    return sum(map(train.batch_at, range(warm))) + train.global_batch * max(train.total_steps - warm, 0)
