"""A batch script for Slurm that trains, and queues its job again until the run is done."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forge_train.base.errors import INTERRUPTED, ConfigError, ForgeError

MARK = "# Written by forge launch slurm."
"""By this line of its head a script is known as one that may be written anew."""
NOTICE = 300
"""Seconds before the time limit at which Slurm sends SIGUSR1, in case nothing has stopped the run earlier."""
SHORTEST = 2 * NOTICE
"""Seconds of a time limit that leave a job time to start and to train, and not only to stop."""
GRACE = 300
"""Seconds that tasks have to end once the first one has."""
_TIME = re.compile(r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+(:\d\d){0,2}")
_OWN = {"nodes": "--nodes", "ntasks-per-node": "--nproc", "ntasks": "--nodes and --nproc", "time": "--time"}
"""Options of sbatch that the layout, or the limit, was checked for."""
_RELIED_ON = {"signal": f"signal=USR1@{NOTICE}", "requeue": "requeue", "no-requeue": "requeue"}
"""Options without which the job would not be queued again."""
_OPTION = re.compile(r"[a-z][a-z0-9-]+")


@dataclass(frozen=True)
class SlurmJob:
    """Requests and commands of a batch script."""

    name: str
    nodes: int
    tasks: int
    """On each node."""
    time: str
    """As `sbatch --time` takes it."""
    folder: Path
    """Working directory of the command."""
    command: Sequence[str]
    """Command of each task."""
    gpus: bool = True
    """Give each task a GPU; other options for GPUs replace this."""
    options: Mapping[str, str] = field(default_factory=dict)
    """More of `sbatch`, by their long names: added, or in place of what is there. A switch is the empty string."""

    def __post_init__(self) -> None:
        if not _TIME.fullmatch(self.time):
            raise ConfigError(
                f"--time {self.time!r}: expected Slurm's minutes, [days-]hours:minutes:seconds or days-hours."
            )
        if 0 < (seconds := _seconds(self.time)) < SHORTEST:  # 0 is no limit
            raise ConfigError(
                f"--time {self.time}: is {seconds} s. Jobs are told to stop {NOTICE} s before the limit, so that "
                f"such a short one would be queued again and again without training; ask for at least {SHORTEST} s."
            )
        if not self.name.isprintable():
            raise ConfigError(f"--name: expected printable characters for the job's name, found {self.name!r}.")
        for name, value in self.options.items():
            if own := _OWN.get(name):
                raise ConfigError(f"--sbatch {name}: say it with {own}.")
            if relied_on := _RELIED_ON.get(name):
                raise ConfigError(
                    f"--sbatch {name}: the script relies on its own --{relied_on}. Leave this out, or edit the script."
                )
            if len(name) == 1:
                raise ConfigError(f"--sbatch {name}: expected the long name of the option, like partition=gpu.")
            if not _OPTION.fullmatch(name) or not value.isprintable():
                raise ConfigError(f"--sbatch {name}={value!r}: expected an option of sbatch, like partition=gpu.")

    def script(self) -> str:
        """The text of the script."""
        others = any(name == "gres" or name.startswith("gpus") for name in self.options)
        asked = {
            "job-name": self.name,
            "nodes": str(self.nodes),
            "ntasks-per-node": str(self.tasks),
            **({"gpus-per-node": str(self.tasks)} if self.gpus and not others else {}),
            "time": self.time,
            "signal": f"USR1@{NOTICE}",
            "requeue": "",
            "open-mode": "append",
            "output": "%x-%j.log",
            **self.options,
        }
        lines = "\n".join(f"#SBATCH --{name}{f'={_quoted(value)}' if value else ''}" for name, value in asked.items())
        return SCRIPT.format(
            mark=MARK,
            lines=lines,
            folder=shlex.quote(str(self.folder)),
            grace=GRACE,
            command=shlex.join(self.command),
            interrupted=INTERRUPTED,
        )


SCRIPT = """\
#!/bin/bash
{mark}
{lines}

set -uo pipefail
cd {folder} || exit
if [ -n "${{SLURM_CPUS_PER_TASK:-}}" ]; then  # since Slurm 22.05, srun does not take it from sbatch
    export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK OMP_NUM_THREADS=${{OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}}
fi
trap : TERM USR1  # the tasks get them too, and save; this script waits for them

code=0
srun --kill-on-bad-exit=0 --wait={grace} \\
    {command} || code=$?

# Interrupted after saving. A job that somebody cancels is completing by now, and stays cancelled.
if [ "$code" -eq {interrupted} ] && [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" != COMPLETING ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def submit(script: Path) -> str:
    """Submit a script; the number of its job.

    Raises:
        ConfigError: if there is no Slurm here.
        ForgeError: with what `sbatch` says, if it refuses.
    """
    try:
        done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError(
            f"There is no sbatch here. Submit it where Slurm is: sbatch {shlex.quote(str(script))}"
        ) from None
    if done.returncode:
        raise ForgeError(f"sbatch refuses {script}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout.strip().partition(";")[0]


def _seconds(time: str) -> int:
    """A time limit as `sbatch --time` takes it."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    else:  # minutes, minutes:seconds or hours:minutes:seconds
        hours, minutes, seconds = {1: (0, *parts, 0), 2: (0, *parts), 3: tuple(parts)}[len(parts)]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _quoted(value: str) -> str:
    """A value as a line of `#SBATCH` takes it: sbatch splits the line as a shell does, and `#` begins a comment."""
    if not re.search(r"[\s'\"#\\]", value):
        return value
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
