"""SkyPilot: a managed job, which goes to whichever cloud has the machines."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path

from forge_train.base.errors import INTERRUPTED, ConfigError
from forge_train.config.schema import section

from .job import ClusterJob
from .launcher import MARK, Launcher, Submitted, file_name

_NAME = re.compile(r"[a-zA-Z0-9]+(?:[._-]{1,2}[a-zA-Z0-9]+)*")
_BUCKET = re.compile(r"[a-z0-9]+://\S+")


@section
class SkyPilotOptions:
    """The table `[launch.skypilot]`."""

    infra: str = ""
    """The place, as cloud/region/zone or k8s/context; empty takes the cheapest."""
    spot: bool = False
    """Take machines that may be taken away, and go on elsewhere when they are."""
    workdir: str = ""
    """A local folder that is copied to each node, and is where the processes start; empty uses --folder there."""
    packages: tuple[str, ...] = ()
    """Packages that pip installs on each node first, like forge-train."""
    labels: dict[str, str] = field(default_factory=dict)
    """Labels of the machines."""


class SkyPilot(Launcher):
    """Writes `NAME.sky.yaml`; uses sky."""

    Options = SkyPilotOptions
    options: SkyPilotOptions

    def files(self, job: ClusterJob) -> Mapping[str, str]:
        self._check(job)
        machines = dataclasses.replace(job.machines, python=job.machines.python or "python")
        job = dataclasses.replace(job, machines=machines)
        text = json.dumps(self._task(job), indent=2, ensure_ascii=False)  # which is YAML too
        return {f"{file_name(job.name)}.sky.yaml": f"# {MARK} skypilot.\n{text}\n"}

    def submit(self, job: ClusterJob, file: Path) -> Sequence[str]:
        return ("sky", "jobs", "launch", "--yes", "--detach-run", "--name", job.name, str(file.absolute()))

    def status(self, job: Submitted) -> Sequence[str]:
        return ("sky", "jobs", "queue")

    def logs(self, job: Submitted) -> Sequence[str]:
        return ("sky", "jobs", "logs", "--no-follow", "--name", job.id)

    def cancel(self, job: Submitted) -> Sequence[str]:
        return ("sky", "jobs", "cancel", "--yes", "--name", job.id)

    def _check(self, job: ClusterJob) -> None:
        machines = job.machines
        if not _NAME.fullmatch(job.name):
            raise ConfigError(
                f"--name {job.name!r}: SkyPilot names jobs with letters, digits, -, _ and .; choose such."
            )
        if job.gpus and not machines.gpu:
            raise ConfigError("--gpu: SkyPilot finds machines by the kind of GPU, like H100; name it.")
        for key in ("queue", "account"):
            if getattr(machines, key):
                raise ConfigError(f"--{key}: has no effect with SkyPilot, which has no queues or accounts.")
        for mount in job.mounts:
            if not _BUCKET.fullmatch(mount.source) and not mount.source.startswith("/"):
                raise ConfigError(f"--mounts {mount.source}: expected a bucket, like s3://runs, or a local folder.")

    def _task(self, job: ClusterJob) -> dict[str, object]:
        machines, own = job.machines, self.options
        recovery = {"max_restarts_on_errors": machines.max_restarts}
        resources = {
            **({"infra": own.infra} if own.infra else {}),
            **({"accelerators": {machines.gpu: machines.nproc}} if job.gpus else {}),
            **({"cpus": f"{machines.cpus * machines.nproc}+"} if machines.cpus else {}),
            **({"memory": f"{machines.memory}+"} if machines.memory else {}),
            **({"image_id": f"docker:{machines.image}"} if machines.image else {}),
            **({"labels": dict(own.labels)} if own.labels else {}),
            "use_spot": own.spot,
            "job_recovery": {**recovery, **({"recover_on_exit_codes": [INTERRUPTED]} if machines.requeue else {})},
        }
        mounts = {
            mount.target: {"source": mount.source, "mode": "MOUNT"} if "://" in mount.source else mount.source
            for mount in job.mounts
        }
        return {
            "name": job.name,
            "num_nodes": machines.nodes,
            "resources": resources,
            **({"workdir": own.workdir} if own.workdir else {}),
            **({"file_mounts": mounts} if mounts else {}),
            **({"envs": dict(machines.env)} if machines.env else {}),
            **(
                {"setup": shlex.join([job.python, "-m", "pip", "install", "--", *own.packages])} if own.packages else {}
            ),
            "run": self._script(job),
        }

    def _script(self, job: ClusterJob) -> str:
        limit = ["--set", f"train.max_hours={job.seconds / 3600}"] if job.seconds else []
        folder = "" if self.options.workdir else f"cd {shlex.quote(str(job.folder))} || exit\n"
        return RUN.format(
            folder=folder, nproc=job.machines.nproc, port=job.port, command=shlex.join([*job.node_command, *limit])
        )


RUN = """\
{folder}export PET_NNODES="$SKYPILOT_NUM_NODES" PET_NODE_RANK="$SKYPILOT_NODE_RANK" PET_NPROC_PER_NODE={nproc}
export PET_MASTER_ADDR="$(head -n 1 <<< "$SKYPILOT_NODE_IPS")" PET_MASTER_PORT={port}
exec {command}
"""
