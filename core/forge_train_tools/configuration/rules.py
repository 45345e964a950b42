"""Rules between values that a run of the kernel alone refuses."""

from __future__ import annotations

from collections.abc import Iterator

from forge_train.base.errors import Problem
from forge_train.config import Config


def problems(config: Config) -> Iterator[Problem]:
    """Mistakes in the kernel's sections that only several values together show."""
    saves = config.checkpoint
    if saves.best.startswith("evaluation.") and not config.train.evaluate_every:
        yield Problem("checkpoint.best", f"{saves.best!r} needs evaluations; set train.evaluate_every.")
    for key, changed in {"best_is": saves.best_is != "lowest", "keep_best": saves.keep_best != 1}.items():
        if changed and not saves.best:
            yield Problem(
                f"checkpoint.{key}", "says which checkpoints are the best; name their metric: checkpoint.best."
            )
    if not (train := config.train).init_from:
        needs = {
            "train.init_missing": train.init_missing,
            "train.init_unexpected": train.init_unexpected,
            "train.init_map": train.init_map,
            "checkpoint.only": config.checkpoint.only,
        }
        for key, patterns in needs.items():
            if patterns:
                yield Problem(key, "needs a checkpoint that gives the other weights; set train.init_from.")
