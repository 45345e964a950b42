"""Rules between core's own values, and the layout of the processes that follows from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import ConfigError
from ..processes.world import World
from ..protocols import Problem
from . import Config
from .sections import ParallelSection

LONGEST_NAME = 200
"""Bytes of a run's name. File systems allow 255, and `--resume never` adds a number."""


class LayoutError(ConfigError):
    """Axes that do not tile the world."""

    def __init__(self, axis: str, message: str) -> None:
        self.problem = Problem(f"parallel.{axis}", message)
        # The arguments as they are: errors are pickled between processes.
        super().__init__(axis, message, key=self.problem.key)

    def __str__(self) -> str:
        return f"{self.problem.key}: {self.problem.message}"


def world_size() -> int:
    """The number of processes a launcher started, 1 without a launcher.

    Raises:
        ConfigError: for an environment that contradicts itself.
    """
    return World.here().size


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh axes over a world of processes."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1

    @classmethod
    def of(cls, parallel: ParallelSection, world: int) -> Layout:
        """Fill in `dp_shard = -1` and check that the axes tile the world.

        Raises:
            LayoutError: stating the rule and the numbers.
        """
        others = parallel.pp * parallel.dp_replicate * parallel.cp * parallel.tp
        shard = parallel.dp_shard
        if shard == 0:
            raise LayoutError("dp_shard", "must be at least 1, or -1 for what is left over; it is 0.")
        if shard == -1:
            if world > others and world % others:
                raise LayoutError(
                    "dp_shard",
                    f"-1 takes what is left over, but pp × dp_replicate × cp × tp = {parallel.pp} × "
                    f"{parallel.dp_replicate} × {parallel.cp} × {parallel.tp} = {others} does not divide the {world} "
                    "processes.",
                )
            shard = max(world // others, 1)
        if others * shard != world:
            raise LayoutError(
                "dp_shard",
                f"pp × dp_replicate × dp_shard × cp × tp = {parallel.pp} × {parallel.dp_replicate} × {shard} × "
                f"{parallel.cp} × {parallel.tp} = {others * shard}, but there {_are(world)}.",
            )
        inner = shard * parallel.cp * parallel.tp
        if parallel.etp not in (1, parallel.tp):
            raise LayoutError("etp", f"must be 1 or tp ({parallel.tp}); it is {parallel.etp}.")
        tiled = inner if parallel.etp == 1 else shard * parallel.cp
        if tiled % parallel.ep:
            axes = "dp_shard × cp × tp" if parallel.etp == 1 else "dp_shard × cp"
            raise LayoutError("ep", f"must divide {axes} ({tiled}); it is {parallel.ep}.")
        return cls(parallel.pp, parallel.dp_replicate, shard, parallel.cp, parallel.tp, parallel.ep, parallel.etp)

    @property
    def data_ranks(self) -> int:
        """Ranks that work on different data."""
        return self.dp_replicate * self.dp_shard

    @property
    def averaged(self) -> int:
        """R: the ranks that SHARD transforms average gradients over."""
        return self.data_ranks * self.cp

    def axes(self) -> dict[str, int]:
        """Axis → size, the sharding and replicating ones."""
        return {
            "pp": self.pp,
            "dp_replicate": self.dp_replicate,
            "dp_shard": self.dp_shard,
            "cp": self.cp,
            "tp": self.tp,
            "ep": self.ep,
            "etp": self.etp,
        }


def _are(world: int) -> str:
    return "is 1 process" if world == 1 else f"are {world} processes"


def check(config: Config, world: int) -> Iterator[Problem]:
    """Mistakes in core's sections that only several values together show."""
    train = config.train
    if problem := _name_problem(config.run.name):
        yield Problem("run.name", problem)
    if bool(train.steps) == bool(train.tokens):
        found = "both" if train.steps else "neither"
        yield Problem("train.steps", f"say how long to train, either in steps or in tokens; found {found}.")
    try:
        layout = Layout.of(config.parallel, world)
    except LayoutError as error:
        yield error.problem
        return
    per_pass = (train.micro_batch or 1) * layout.data_ranks
    if train.global_batch % per_pass:
        yield Problem(
            "train.global_batch",
            f"{train.global_batch} is not a multiple of micro_batch × data-parallel ranks "
            f"= {train.micro_batch or 1} × {layout.data_ranks} = {per_pass}.",
        )


def _name_problem(name: str) -> str:
    """Why a run can't have this name; empty if it can. An empty name is none."""
    if name in (".", "..") or "/" in name or "\\" in name:
        return f"expected the name of a folder, found the path {name!r}; its place is --run-dir."
    if name.startswith("."):
        return f"expected a name that does not begin with a dot, found {name!r}: its folder would be hidden."
    if name != name.strip() or not name.isprintable():
        return f"expected printable characters, and no spaces at either end, found {name!r}."
    if (size := len(name.encode())) > LONGEST_NAME:
        return f"expected at most {LONGEST_NAME} bytes, found {size}: {name[:40]!r}…"
    return ""


def fill_in(config: Config, world: int) -> Config:
    """A checked configuration with the values that follow from others."""
    train = config.train
    if train.micro_batch:
        return config
    share = train.global_batch // Layout.of(config.parallel, world).data_ranks
    filled = dataclasses.replace(train, micro_batch=share)
    return dataclasses.replace(config, train=filled, as_written={"train": {"micro_batch": 0}})


def total_steps(config: Config) -> int:
    """Optimizer steps of the run."""
    per_step = config.train.global_batch * config.train.sequence
    return config.train.steps or -(-config.train.tokens // per_step)
