"""Generates rows one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from forge_train.contract.model import Model
from forge_train.plugin.job import Job

from ..offline.logits import Logits
from .rows import TextRow, check_whole


def run(job: Job, model: Model, rows: Iterator[TextRow], *, slots: int) -> Iterator[TextRow]:
    """Yield the rows once they are done. Over several ranks, all of them must iterate over equal rows.

    Args:
        job: provides the task.
        model: in one part, and in evaluation mode.
        rows: what to generate.
        slots: rows side by side.

    Raises:
        ConfigError: the model is cut.
    """
    check_whole(job, model)
    for row in rows:
        logits, new = Logits(job, model.parts[0], row.prompt + row.most), row.ids
        while not row.done:
            choice = job.dist.on_main(partial(row.choose, logits(new)))
            row.add(choice)
            new = [choice.id]
        yield row
