"""Processes that Slurm or MPI started: their variables, translated to those of torchrun, which the kernel reads."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping

from forge_train.base.errors import ConfigError
from forge_train.mesh.world import FORGE_LAUNCHED, FORGE_LAUNCHER, World, integer, rank_of

_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""Open MPI; MPICH and Intel MPI. Rank, size, and the same on this node."""
_PORTS = range(20000, 30000)
"""Range of ports for jobs that name none: below those that systems assign automatically."""


def here() -> World:
    """Rank of this process and the size of its job. After the first call, the kernel reads the same.

    Raises:
        ConfigError: for variables that contradict each other, naming them.
    """
    os.environ |= translated(os.environ)
    return World.here()


def translated(given: Mapping[str, str]) -> dict[str, str]:
    """The variables of torchrun that follow from those of Slurm or MPI; empty if torchrun's are set, or none are.

    Raises:
        ConfigError: for variables that contradict each other, naming them.
    """
    mpi = next((names for names in _MPI if names[0] in given and names[1] in given), None)
    if "RANK" in given or "WORLD_SIZE" in given:
        if mpi:
            _compare(given, mpi[0], mpi[1])
        elif _is_slurm_task(given):
            _compare(given, "SLURM_PROCID", "SLURM_NTASKS")
        return {}
    if mpi:
        return _mpi(given, mpi)
    return _slurm(given) if _is_slurm_task(given) else {}


def _compare(given: Mapping[str, str], other_rank: str, other_size: str) -> None:
    """Check that two launchers agree. torchrun under another launcher is allowed: one agent per task."""
    if "TORCHELASTIC_RUN_ID" in given or FORGE_LAUNCHED in given:
        return
    mine, other = rank_of(given, "RANK", "WORLD_SIZE"), rank_of(given, other_rank, other_size)
    if mine != other:
        raise ConfigError(
            f"The environment contradicts itself: RANK={mine[0]} and WORLD_SIZE={mine[1]}, but "
            f"{other_rank}={other[0]} and {other_size}={other[1]}. Start through one launcher, or unset one pair."
        )


def _mpi(given: Mapping[str, str], names: tuple[str, str, str, str]) -> dict[str, str]:
    rank, size = rank_of(given, names[0], names[1])
    local_size = integer(given, names[3], 1)
    address = given.get("MASTER_ADDR", "127.0.0.1" if local_size == size else "")
    if not address:
        raise ConfigError(
            f"The environment has {names[1]}={size} ranks on several nodes but no MASTER_ADDR, and MPI does not say "
            "where rank 0 is: pass it on, for instance with mpirun -x MASTER_ADDR=HOST."
        )
    job = given.get("OMPI_MCA_ess_base_jobid") or given.get("PMIX_NAMESPACE") or given.get("PMI_JOBID") or ""
    return _variables(given, "mpi", rank, size, integer(given, names[2], 0), local_size, address, job)


def _is_slurm_task(given: Mapping[str, str]) -> bool:
    """Return True if srun started this process. A batch script sees the same variables, but it is one process: only a
    step has an id."""
    if "SLURM_PROCID" not in given or "SLURM_NTASKS" not in given:
        return False
    return "SLURM_STEP_ID" in given or "SLURM_JOB_ID" not in given


def _slurm(given: Mapping[str, str]) -> dict[str, str]:
    rank, size = rank_of(given, "SLURM_PROCID", "SLURM_NTASKS")
    nodes = given.get("SLURM_STEP_NODELIST") or given.get("SLURM_JOB_NODELIST") or given.get("SLURM_NODELIST") or ""
    tasks = given.get("SLURM_STEP_TASKS_PER_NODE") or given.get("SLURM_TASKS_PER_NODE") or ""
    local_size = _tasks_here(tasks, integer(given, "SLURM_NODEID", 0), size if not nodes else 1)
    address = given.get("MASTER_ADDR", first_host(nodes) or ("127.0.0.1" if local_size == size else ""))
    if size > 1 and not address:
        raise ConfigError(
            f"The environment has SLURM_NTASKS={size} but neither SLURM_JOB_NODELIST nor MASTER_ADDR: nobody says "
            "where rank 0 is."
        )
    local_rank = integer(given, "SLURM_LOCALID", 0)
    job = given.get("SLURM_JOB_ID", "") + given.get("SLURM_STEP_ID", "")
    found = _variables(given, "slurm", rank, size, local_rank, max(local_size, local_rank + 1), address, job)
    return {**found, "TORCHELASTIC_RESTART_COUNT": str(integer(given, "SLURM_RESTART_COUNT", 0))}


def _variables(
    given: Mapping[str, str],
    launcher: str,
    rank: int,
    size: int,
    local_rank: int,
    local_size: int,
    address: str,
    job: str,
) -> dict[str, str]:
    """MASTER_PORT is as given, or the same one for all processes of a job and another one for another job."""
    port = integer(given, "MASTER_PORT", _PORTS[zlib.crc32(job.encode()) % len(_PORTS)])
    return {
        FORGE_LAUNCHER: launcher,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


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
