"""Rank and scale of each update, and how the weight beneath it is held."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from forge_train import ConfigError
from forge_train_kit.model.block_format import BlockFormat

if TYPE_CHECKING:
    from ..lora import LoRA
    from .fixed import Fixed


@dataclass
class Sizes:
    """Rank and alpha of each update: those of the section, or of the adapter that the run begins with."""

    config: LoRA.Config
    given: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Weight → rank and alpha in `lora.adapter`."""
    fixed: dict[str, tuple[Fixed, ...]] = field(default_factory=dict)
    """Weight → its updates that are not trained."""

    def chosen(self, name: str) -> tuple[int, float]:
        """Rank and alpha of a weight's update.

        Raises:
            ConfigError: if two groups match the weight.
        """
        if name in self.given:
            return self.given[name]
        config = self.config
        hits = [group for group in config.groups if fnmatchcase(name, group.match)]
        if len(hits) > 1:
            both = " and ".join(repr(group.match) for group in hits)
            raise ConfigError(f"lora.groups: {both} both match {name!r}.", key="lora.groups")
        rank, alpha = config.rank, config.alpha
        for group in hits:
            rank, alpha = group.rank or rank, group.alpha or alpha
        return rank, alpha

    def of(self, name: str) -> tuple[int, float]:
        """Rank and scale of a weight's update; raises as `chosen` does."""
        rank, alpha = self.chosen(name)
        return rank, alpha / divisor(rank, self.config.rslora)

    def together(self, name: str) -> tuple[int, float]:
        """Rank and alpha of one update that is the weight's own and the fixed ones; raises as `chosen` does."""
        rank, scale = self.of(name)
        total = rank + sum(one.rank for one in self.fixed.get(name, ()))
        return (total, scale * divisor(total, self.config.rslora)) if total > rank else self.chosen(name)


def divisor(rank: int, rslora: bool) -> float:
    """The divisor of alpha."""
    return math.sqrt(rank) if rslora else rank


def format_of(config: LoRA.Config) -> BlockFormat | None:
    """The codes of linears and stacks with an update; None if they stay as they are."""
    return BlockFormat(config.base, config.base_block, config.base_double) if config.base else None
