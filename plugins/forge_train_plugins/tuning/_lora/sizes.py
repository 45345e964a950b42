"""Rank and scale of each update, and how the weight beneath it is held."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from forge_train import ConfigError
from forge_train_kit.model.block_format import BlockFormat

if TYPE_CHECKING:
    from ..lora import LoRA


def size(config: LoRA.Config, name: str) -> tuple[int, float]:
    """Rank and scale of a linear's update; raises as `chosen` does."""
    rank, alpha = chosen(config, name)
    return rank, alpha / (math.sqrt(rank) if config.rslora else rank)


def chosen(config: LoRA.Config, name: str) -> tuple[int, float]:
    """Rank and alpha of a linear's update.

    Raises:
        ConfigError: if two groups match the linear.
    """
    hits = [group for group in config.groups if fnmatchcase(name, group.match)]
    if len(hits) > 1:
        both = " and ".join(repr(group.match) for group in hits)
        raise ConfigError(f"lora.groups: {both} both match {name!r}.", key="lora.groups")
    rank, alpha = config.rank, config.alpha
    for group in hits:
        rank, alpha = group.rank or rank, group.alpha or alpha
    return rank, alpha


def format_of(config: LoRA.Config) -> BlockFormat | None:
    """The codes of linears and stacks with an update; None if they stay as they are."""
    return BlockFormat(config.base, config.base_block, config.base_double) if config.base else None
