"""Recipe of a run's mixture: weights by phase, and the limit of each source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from forge_train_kit.data.proportions import Recipe, tempered

if TYPE_CHECKING:
    from forge_train import Job
    from forge_train_kit.data.rows import Rows

    from ..mixture import Mixture


def run_recipe(config: Mixture.Config, names: list[str], job: Job, rows: Mapping[str, Rows]) -> Recipe:
    """Key the weights by the index of the first sequence that they apply to, and limit each source to its epochs."""
    train = job.config.train
    first = {0: tuple(source.weight for source in config.sources)}
    for phase in config.phases:
        first[sum(map(train.batch_at, range(phase.first_step(job.config))))] = phase.weights
    phases = [
        (at, tempered(dict(zip(names, weights, strict=True)), config.temperature)) for at, weights in first.items()
    ]
    caps = {
        name: int(rows[name].count * source.epochs)
        for name, source in zip(names, config.sources, strict=True)
        if source.epochs
    }
    return Recipe(phases, job.seed, caps, samples=sum(map(train.batch_at, range(train.total_steps))))
