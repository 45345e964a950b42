"""A batch script for Slurm that trains, and queues its job again until the run is done."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Literal

from forge_train.base.errors import INTERRUPTED, ConfigError
from forge_train.config.schema import section

from .job import ClusterJob
from .launcher import MARK, Launcher, Submitted, file_name

NOTICE = 300
"""Seconds before the time limit at which Slurm sends SIGUSR1, in case nothing has stopped the run earlier."""
SHORTEST = 2 * NOTICE
"""Seconds of a time limit that leave a job time to start and to train, and not only to stop."""
GRACE = 300
"""Seconds that tasks have to end once the first one has."""
_SAY = {
    "account": "--account",
    "array": "--each",
    "cpus-per-task": "--cpus",
    "mem": "--memory",
    "nodes": "--nodes",
    "ntasks": "--nodes and --nproc",
    "ntasks-per-node": "--nproc",
    "partition": "--queue",
    "time": "--time",
}
"""Options of sbatch that have one here."""
_RELIED_ON = {"signal": f"signal=USR1@{NOTICE}", "requeue": "requeue", "no-requeue": "requeue"}
"""Options without which the job would not be queued again."""
_OPTION = re.compile(r"[a-z][a-z0-9-]+")


@section
class SlurmOptions:
    """The table `[launch.slurm]`."""

    container: Literal["pyxis", "apptainer"] = "pyxis"
    """Runs the image: srun's options of pyxis (enroot), or apptainer."""
    sbatch: dict[str, str] = field(default_factory=dict)
    """More options of sbatch by their long names, like exclusive or constraint=h100."""
    each: dict[str, str] = field(default_factory=dict)
    """An array with a run for each of these values, separated by commas, as in train.seed=1,2,3."""


class Slurm(Launcher):
    """Writes `NAME.sbatch`; uses sbatch, squeue and scancel."""

    Options = SlurmOptions
    options: SlurmOptions
    plugins = ("signals",)

    def variants(self) -> list[list[str]]:
        if not self.options.each:
            return [[]]
        columns = {key: [one.strip() for one in values.split(",")] for key, values in self.options.each.items()}
        counts = {key: len(values) for key, values in columns.items()}
        if len(set(counts.values())) > 1:
            said = ", ".join(f"{key} has {count}" for key, count in counts.items())
            raise ConfigError(f"--each: every key needs as many values as there are runs; {said}.")
        rows = zip(*columns.values(), strict=True)
        return [[f"{key}={value}" for key, value in zip(columns, row, strict=True)] for row in rows]

    def files(self, job: ClusterJob) -> Mapping[str, str]:
        self._check(job)
        lines = "\n".join(
            f"#SBATCH --{name}{f'={_quoted(value)}' if value else ''}" for name, value in self._asked(job)
        )
        runs = self.variants() if self.options.each else []
        again = AGAIN.format(interrupted=INTERRUPTED) if job.machines.requeue else ""
        text = SCRIPT.format(
            mark=f"# {MARK} slurm.",
            lines=lines,
            exports="".join(f"export {name}={shlex.quote(value)}\n" for name, value in job.machines.env.items()),
            folder=shlex.quote(str(job.folder)),
            runs=_cases(runs, job.name),
            grace=GRACE,
            container="".join(f"{shlex.quote(option)} \\\n        " for option in self._container(job)),
            command=shlex.join(job.command) + (' "${more[@]}"' if runs else ""),
            restarts=job.machines.max_restarts,
            interrupted=INTERRUPTED,
            again=again,
        )
        return {f"{file_name(job.name)}.sbatch": text}

    def existing(self, job: ClusterJob) -> Sequence[str]:
        return ("squeue", "--me", "-h", f"--name={job.name}", "-o", "%i (%T)")

    def submit(self, job: ClusterJob, file: Path) -> Sequence[str]:
        return ("sbatch", "--parsable", str(file.absolute()))

    def submitted(self, job: ClusterJob, said: str) -> str:
        return said.strip().partition(";")[0]

    def status(self, job: Submitted) -> Sequence[str]:
        return ("squeue", "--states=all", f"--jobs={job.id}", "-o", "%i %j %T %M of %l on %D nodes %R")

    def logs(self, job: Submitted) -> Sequence[str]:
        pattern = self.options.sbatch.get("output", _log(bool(self.options.each)))
        known = {"x": _escaped(job.name), "j": job.id, "A": job.id, "a": "*", "%": "%"}
        path = re.sub(r"%([xjAa%])", lambda found: known[found[1]], pattern)
        found = sorted(job.folder.glob(path)) if not Path(path).is_absolute() else [Path(path)]
        if not found:
            raise ConfigError(
                f"Job {job.id} has no log {path} in {job.folder} yet; --status says whether it has begun."
            )
        return ("cat", "--", *map(str, found))

    def cancel(self, job: Submitted) -> Sequence[str]:
        return ("scancel", job.id)

    def _check(self, job: ClusterJob) -> None:
        if not job.machines.time:
            raise ConfigError("--time: the script stops the run before the job's time limit; name it, like 24:00:00.")
        if 0 < job.seconds < SHORTEST:  # 0 is no limit
            raise ConfigError(
                f"--time {job.machines.time}: is {job.seconds} s. Jobs are told to stop {NOTICE} s before the limit, "
                f"so that such a short one would be queued again and again without training; ask for at least "
                f"{SHORTEST} s."
            )
        for name, value in self.options.sbatch.items():
            if said := _SAY.get(name):
                raise ConfigError(f"--sbatch {name}: say it with {said}.")
            if relied_on := _RELIED_ON.get(name):
                raise ConfigError(
                    f"--sbatch {name}: the script relies on its own --{relied_on}. Leave this out, or edit the script."
                )
            if len(name) == 1:
                raise ConfigError(f"--sbatch {name}: expected the long name of the option, like exclusive.")
            if not _OPTION.fullmatch(name) or not value.isprintable():
                raise ConfigError(f"--sbatch {name}={value!r}: expected an option of sbatch, like constraint=h100.")

    def _asked(self, job: ClusterJob) -> Iterator[tuple[str, str]]:
        """Options of the script's head, those of `sbatch` last."""
        machines, more = job.machines, self.options.sbatch
        others = any(name == "gres" or name.startswith("gpus") for name in more)
        kind = f"{machines.gpu}:" if machines.gpu else ""
        asked = {
            "job-name": job.name,
            "nodes": str(machines.nodes),
            "ntasks-per-node": str(machines.nproc),
            **({"gpus-per-node": f"{kind}{machines.nproc}"} if job.gpus and not others else {}),
            **({"cpus-per-task": str(machines.cpus)} if machines.cpus else {}),
            **({"mem": f"{machines.memory}G"} if machines.memory else {}),
            "time": machines.time,
            **({"partition": machines.queue} if machines.queue else {}),
            **({"account": machines.account} if machines.account else {}),
            **({"array": f"0-{len(self.variants()) - 1}"} if self.options.each else {}),
            "signal": f"USR1@{NOTICE}",
            **({"requeue": ""} if machines.requeue else {"no-requeue": ""}),
            "open-mode": "append",
            "output": _log(bool(self.options.each)),
            **more,
        }
        yield from asked.items()

    def _container(self, job: ClusterJob) -> Iterator[str]:
        """Yield the words between srun's options and the command."""
        image, mounts = job.machines.image, job.mounts
        if not image:
            return
        if self.options.container == "pyxis":
            yield f"--container-image={image}"
            yield f"--container-workdir={job.folder}"
            read_only = {True: ":ro", False: ""}
            seen = ",".join(f"{one.source}:{one.target}{read_only[one.read_only]}" for one in mounts)
            yield f"--container-mounts={seen}"  # the run's folder is among them
            if job.machines.env:
                yield f"--container-env={','.join(job.machines.env)}"
            return
        yield from ("apptainer", "exec", *(["--nv"] if job.gpus else []), "--pwd", str(job.folder))
        for mount in mounts:
            yield from ("--bind", f"{mount.source}:{mount.target}:{'ro' if mount.read_only else 'rw'}")
        yield image


def _log(array: bool) -> str:
    return "%x-%A_%a.log" if array else "%x-%j.log"


def _cases(runs: Sequence[Sequence[str]], name: str) -> str:
    """Arguments that each job of an array adds; the last --name wins."""
    if not runs:
        return ""
    lines = ['case "$SLURM_ARRAY_TASK_ID" in']
    for index, settings in enumerate(runs):
        words = [word for one in settings for word in ("--set", one)]
        lines.append(f"    {index}) more=({shlex.join([*words, '--name', f'{name}-{index}'])}) ;;")
    return "\n".join([*lines, "esac", ""])


SCRIPT = """\
#!/bin/bash
{mark}
{lines}

set -uo pipefail
{exports}cd {folder} || exit
if [ -n "${{SLURM_CPUS_PER_TASK:-}}" ]; then  # since Slurm 22.05, srun does not take it from sbatch
    export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK OMP_NUM_THREADS=${{OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}}
fi
trap : TERM USR1  # the tasks get them too, and save; this script waits for them
{runs}
for ((attempt = 0; attempt <= {restarts}; attempt++)); do
    code=0
    srun --kill-on-bad-exit=0 --wait={grace} \\
        {container}{command} || code=$?
    case $code in 0 | 2 | 3 | {interrupted}) break ;; esac  # another attempt would change nothing
done
{again}exit "$code"
"""
AGAIN = """
# Interrupted after saving. A job that somebody cancels is completing by now, and stays cancelled.
if [ "$code" -eq {interrupted} ] && [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" != COMPLETING ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
"""


def _quoted(value: str) -> str:
    """A value as a line of `#SBATCH` takes it: sbatch splits the line as a shell does, and `#` begins a comment."""
    if not re.search(r"[\s'\"#\\]", value):
        return value
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def _escaped(name: str) -> str:
    """A name in a pattern of files."""
    return re.sub(r"([*?\[])", r"[\1]", name.replace("/", "_"))
