"""Rank of this process and the size of its job, as reported by its launcher. Available without torch."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..base.errors import ConfigError

Launcher = Literal["none", "forge", "torchrun", "slurm", "mpi"]

FORGE_LAUNCHED = "FORGE_LAUNCHED"
"""Set in the processes that forge's own launcher starts, to its process id."""

_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""Open MPI; MPICH and Intel MPI. Rank, size, and the same on this node."""
_PORTS = range(20000, 30000)
"""Range of ports for jobs that name none: below those that systems assign automatically."""


@dataclass(frozen=True)
class World:
    """Values that a launcher (forge's own, torchrun, Slurm, MPI) gave this process."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    attempt: int = 0
    """Number of times the launcher has started these processes before."""
    launcher: Launcher = "none"
    address: str = ""
    """Address at which the processes meet; empty for a single process."""
    port: int = 0
    max_restarts: int = 0
    """Number of times torchrun restarts them if they fail."""

    @classmethod
    def here(cls, environment: Mapping[str, str] | None = None) -> World:
        """Read the environment.

        Raises:
            ConfigError: for variables that contradict each other, naming them.
        """
        given = _Environment(os.environ if environment is None else environment)
        mpi = next((names for names in _MPI if names[0] in given and names[1] in given), None)
        if "RANK" in given or "WORLD_SIZE" in given:
            world = _torchrun(given)
            if mpi:
                given.compare("RANK", "WORLD_SIZE", mpi[0], mpi[1])
            elif _is_slurm_task(given):
                given.compare("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS")
        elif mpi:
            world = _mpi(given, mpi)
        elif _is_slurm_task(given):
            world = _slurm(given)
        else:
            return cls()
        if not 0 <= world.local_rank < world.local_size <= world.size:
            raise ConfigError(
                f"The environment ({world.launcher}) has local rank {world.local_rank} of {world.local_size} on this "
                f"node, and {world.size} ranks in all: that can't be."
            )
        return world


class _Environment:
    """Variables, read strictly."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self.values = values

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def text(self, name: str, default: str = "") -> str:
        return self.values.get(name, default)

    def integer(self, name: str, default: int) -> int:
        text = self.values.get(name, str(default))
        try:
            return int(text)
        except ValueError:
            raise ConfigError(f"The environment has {name}={text!r}; expected an integer.") from None

    def rank_of(self, rank_name: str, size_name: str) -> tuple[int, int]:
        """Rank and size by the names of their variables, checked."""
        rank, size = self.integer(rank_name, 0), self.integer(size_name, 1)
        if not 0 <= rank < size:
            raise ConfigError(f"The environment has {rank_name}={rank} and {size_name}={size}: no such rank.")
        return rank, size

    def compare(self, rank: str, size: str, other_rank: str, other_size: str) -> None:
        """Check that two launchers agree. torchrun under another launcher is allowed: one agent per task."""
        if "TORCHELASTIC_RUN_ID" in self or FORGE_LAUNCHED in self:
            return
        mine, other = self.rank_of(rank, size), self.rank_of(other_rank, other_size)
        if mine != other:
            raise ConfigError(
                f"The environment contradicts itself: {rank}={mine[0]} and {size}={mine[1]}, but "
                f"{other_rank}={other[0]} and {other_size}={other[1]}. Start through one launcher, or unset one pair."
            )


def _torchrun(given: _Environment) -> World:
    """forge's own launcher, torchrun, or anything that sets the same variables."""
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name not in given:
            raise ConfigError(
                f"The environment has {other}={given.text(other)} but no {name}: start through one launcher."
            )
    rank, size = given.rank_of("RANK", "WORLD_SIZE")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in given]
    if size > 1 and missing:
        raise ConfigError(f"The environment has WORLD_SIZE={size} but no {' and no '.join(missing)}.")
    local_rank = given.integer("LOCAL_RANK", 0)
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=given.integer("LOCAL_WORLD_SIZE", local_rank + 1),
        attempt=given.integer("TORCHELASTIC_RESTART_COUNT", 0),
        max_restarts=given.integer("TORCHELASTIC_MAX_RESTARTS", 0),
        launcher="forge" if FORGE_LAUNCHED in given else "torchrun",
        address=given.text("MASTER_ADDR"),
        port=given.integer("MASTER_PORT", 0),
    )


def _mpi(given: _Environment, names: tuple[str, str, str, str]) -> World:
    rank, size = given.rank_of(names[0], names[1])
    local_size = given.integer(names[3], 1)
    address = given.text("MASTER_ADDR", "127.0.0.1" if local_size == size else "")
    if not address:
        raise ConfigError(
            f"The environment has {names[1]}={size} ranks on several nodes but no MASTER_ADDR, and MPI does not say "
            "where rank 0 is: pass it on, for instance with mpirun -x MASTER_ADDR=HOST."
        )
    job = given.text("OMPI_MCA_ess_base_jobid") or given.text("PMIX_NAMESPACE") or given.text("PMI_JOBID")
    return World(
        rank=rank,
        size=size,
        local_rank=given.integer(names[2], 0),
        local_size=local_size,
        launcher="mpi",
        address=address,
        port=_port(given, job),
    )


def _is_slurm_task(given: _Environment) -> bool:
    """Return True if srun started this process. A batch script sees the same variables, but it is one process: only a
    step has an id."""
    if "SLURM_PROCID" not in given or "SLURM_NTASKS" not in given:
        return False
    return "SLURM_STEP_ID" in given or "SLURM_JOB_ID" not in given


def _slurm(given: _Environment) -> World:
    rank, size = given.rank_of("SLURM_PROCID", "SLURM_NTASKS")
    nodes = given.text("SLURM_STEP_NODELIST") or given.text("SLURM_JOB_NODELIST") or given.text("SLURM_NODELIST")
    first = first_host(nodes)
    tasks = given.text("SLURM_STEP_TASKS_PER_NODE") or given.text("SLURM_TASKS_PER_NODE")
    local_size = _tasks_here(tasks, given.integer("SLURM_NODEID", 0), size if not nodes else 1)
    address = given.text("MASTER_ADDR", first or ("127.0.0.1" if local_size == size else ""))
    if size > 1 and not address:
        raise ConfigError(
            f"The environment has SLURM_NTASKS={size} but neither SLURM_JOB_NODELIST nor MASTER_ADDR: nobody says "
            "where rank 0 is."
        )
    local_rank = given.integer("SLURM_LOCALID", 0)
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=max(local_size, local_rank + 1),
        attempt=given.integer("SLURM_RESTART_COUNT", 0),
        launcher="slurm",
        address=address,
        port=_port(given, given.text("SLURM_JOB_ID") + given.text("SLURM_STEP_ID")),
    )


def _port(given: _Environment, job: str) -> int:
    """MASTER_PORT, or the same one for all processes of a job, and another one for another job."""
    return given.integer("MASTER_PORT", _PORTS[zlib.crc32(job.encode()) % len(_PORTS)])


def first_host(nodes: str) -> str:
    """The first of a Slurm list of nodes: `gpu[003-005,9],login` → `gpu003`."""
    found = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\])?([^,]*)", nodes)
    return "".join(part or "" for part in found.groups()) if found else ""


def _tasks_here(tasks: str, node: int, unknown: int) -> int:
    """Return the number of tasks on a node, from Slurm's `2(x3),1`."""
    counts: list[int] = []
    for part in filter(None, tasks.split(",")):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise ConfigError(f"The environment has SLURM_TASKS_PER_NODE={tasks!r}; expected something like '2(x3),1'.")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts[node] if node < len(counts) else unknown


def world_size() -> int:
    """The number of processes a launcher started, 1 without a launcher.

    Raises:
        ConfigError: for an environment that contradicts itself.
    """
    return World.here().size


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
