"""Rank of this process and the size of its job, as its launcher has set them in the environment. Available without
torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ..base.errors import ConfigError

FORGE_LAUNCHED = "FORGE_LAUNCHED"
"""Set in the processes that forge's own launcher starts, to its process id."""
FORGE_LAUNCHER = "FORGE_LAUNCHER"
"""Name of a launcher whose own variables were translated to torchrun's; see `forge_train_tools.launching.world`."""


@dataclass(frozen=True)
class World:
    """Values that a launcher gave this process, in the environment variables of torchrun."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    attempt: int = 0
    """Number of times the launcher has started these processes before."""
    launcher: str = "none"
    """`none`, `forge`, `torchrun`, or the value of `FORGE_LAUNCHER`."""
    address: str = ""
    """Address at which the processes meet; empty for a single process."""
    port: int = 0
    max_restarts: int = 0
    """Number of times torchrun restarts them if they fail."""

    @classmethod
    def here(cls, environment: Mapping[str, str] | None = None) -> World:
        """Read the environment.

        Raises:
            ConfigError: for variables that are missing or contradict each other, naming them.
        """
        given = os.environ if environment is None else environment
        if not given.keys() & {"RANK", "WORLD_SIZE"}:
            return cls()
        for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
            if name not in given:
                raise ConfigError(
                    f"The environment has {other}={given[other]} but no {name}: start through one launcher."
                )
        rank, size = rank_of(given, "RANK", "WORLD_SIZE")
        if size > 1 and (missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in given]):
            raise ConfigError(f"The environment has WORLD_SIZE={size} but no {' and no '.join(missing)}.")
        local_rank = integer(given, "LOCAL_RANK", 0)
        local_size = integer(given, "LOCAL_WORLD_SIZE", local_rank + 1)
        launcher = "forge" if FORGE_LAUNCHED in given else given.get(FORGE_LAUNCHER, "torchrun")
        if not 0 <= local_rank < local_size <= size:
            raise ConfigError(
                f"The environment ({launcher}) has local rank {local_rank} of {local_size} on this "
                f"node, and {size} ranks in all: that can't be."
            )
        return cls(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            attempt=integer(given, "TORCHELASTIC_RESTART_COUNT", 0),
            launcher=launcher,
            address=given.get("MASTER_ADDR", ""),
            port=integer(given, "MASTER_PORT", 0),
            max_restarts=integer(given, "TORCHELASTIC_MAX_RESTARTS", 0),
        )


def integer(given: Mapping[str, str], name: str, default: int) -> int:
    """An environment variable as an integer.

    Raises:
        ConfigError: if it is something else.
    """
    text = given.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"The environment has {name}={text!r}; expected an integer.") from None


def rank_of(given: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    """Rank and size by the names of their variables.

    Raises:
        ConfigError: if there is no such rank.
    """
    rank, size = integer(given, rank_name, 0), integer(given, size_name, 1)
    if not 0 <= rank < size:
        raise ConfigError(f"The environment has {rank_name}={rank} and {size_name}={size}: no such rank.")
    return rank, size


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
