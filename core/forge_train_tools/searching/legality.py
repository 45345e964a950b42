"""Verdicts on layouts, by the rules of the core and of plugins, and by compositions of short models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from forge_train.base.errors import ConfigError
from forge_train.config import rules
from forge_train.registry.setup import Setup, misfits

from .candidates import Candidate, provider
from .forms import Forms
from .points import Points


@dataclass
class Legality:
    """Reasons why layouts can't be; an empty text for one that can.

    What a single axis does to the model is asked of a composition with that axis alone, on a short model. What values
    do to each other, the same checks tell that a run makes before it composes.
    """

    forms: Forms
    points: Points
    world: int
    global_batch: int

    def __post_init__(self) -> None:
        self.of_axis = cache(self._of_axis)
        self.of_rows = cache(self._of_rows)

    def _of_axis(self, *sizes: tuple[str, int]) -> str:
        """The composition's verdict on some axes, with 1 for the others."""
        axes = {axis: size for axis, size in sizes if size > 1}
        if "ep" in axes:
            axes["dp_shard"] = axes["ep"]
        for needed in filter(None, map(provider, axes)):
            if needed not in self.points.options.axes:
                return f"no installed plugin provides {needed}"
        try:
            with self.points.composer.composed(self.points.variant(self.points.base, axes), axes):
                return ""
        except ConfigError as error:
            return str(error)

    def _of_rows(self, tp: int, shards: int) -> str:
        return self._of_axis(("tp", tp), ("dp_shard", shards))

    def of_values(self, c: Candidate) -> str:
        setup: Setup = self.points.composer.setup(c.variant)
        config = setup.config
        parallel = replace(config.parallel, **c.sizes)
        config = replace(config, parallel=parallel, train=replace(config.train, micro_batch=c.micro_batch))
        for problem in (*rules.check(config, self.world), *setup.hooks.check_config(config)):
            if not problem.data:
                return f"{problem.key}: {problem.message}"
        return next(iter(misfits(setup.hooks, config)), "")

    def verdict(self, c: Candidate) -> str:
        """Why a candidate can't be; empty if it can."""
        if reason := self.of_values(c):
            return reason
        try:
            schedule = self.forms.schedule(c)
            self.forms.cut.holdings(schedule)
        except ConfigError as error:
            return str(error)
        if c.tp > 1 and c.shards > 1 and self._is_uneven(c):
            return self.of_rows(c.tp, c.shards)
        return ""

    def _is_uneven(self, c: Candidate) -> bool:
        """Return True if some rows of a rank do not divide into its shards: then a composition has to tell."""
        return self.forms.rows_left(c.tp, c.ep, c.etp, c.shards)
