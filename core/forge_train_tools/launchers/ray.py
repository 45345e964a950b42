"""Ray: a script that takes a placement group, with an actor for each node that starts its processes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from forge_train.base.errors import INTERRUPTED, ConfigError
from forge_train.base.strict_json import dumps
from forge_train.config.schema import section

from .job import ClusterJob
from .launcher import MARK, Launcher, Submitted, file_name

_PLAIN = re.compile(r"[\w./@%+=:,-]+", re.ASCII)


@section
class RayOptions:
    """The table `[launch.ray]`."""

    address: str = ""
    """The dashboard, like http://head:8265; empty takes RAY_ADDRESS, or the cluster of this machine."""


class Ray(Launcher):
    """Writes `NAME.ray.py`; uses ray job. Ray's head must see the file under the same path."""

    Options = RayOptions
    options: RayOptions

    def files(self, job: ClusterJob) -> Mapping[str, str]:
        machines = job.machines
        for key in ("queue", "account", "image"):
            if getattr(machines, key):
                raise ConfigError(f"--{key}: has no effect with Ray, whose nodes are there as they are.")
        limit = ["--set", f"train.max_hours={job.seconds / 3600}"] if job.seconds else []
        once = dataclasses.replace(job, machines=dataclasses.replace(machines, max_restarts=0)).node_command
        at = once.index("--")
        told = {
            "command": [*once[:at], "--follow-stdin", *once[at:], *limit],
            "folder": str(job.folder),
            "environment": {
                **machines.env,
                "PET_NNODES": str(machines.nodes),
                "PET_NPROC_PER_NODE": str(machines.nproc),
                "PET_MASTER_PORT": str(job.port),
            },
            "bundle": {
                "CPU": max(machines.cpus, 1) * machines.nproc,
                **({"GPU": machines.nproc} if job.gpus else {}),
                **({f"accelerator_type:{machines.gpu}": 0.001} if machines.gpu else {}),
                **({"memory": machines.memory << 30} if machines.memory else {}),
            },
            "nodes": machines.nodes,
            "max_restarts": machines.max_restarts,
            "requeue": machines.requeue,
        }
        text = SCRIPT.format(mark=MARK, told=ascii(dumps(told)), interrupted=INTERRUPTED)
        return {f"{file_name(job.name)}.ray.py": text}

    def submit(self, job: ClusterJob, file: Path) -> Sequence[str]:
        """Ray joins the command for a shell, older versions without quotes: only plain words may be in it."""
        for word in (str(file.absolute()), job.python):
            if not _PLAIN.fullmatch(word):
                raise ConfigError(
                    f"{word!r}: Ray passes this path through a shell; use one of letters, digits and ./_- alone."
                )
        if not _PLAIN.fullmatch(job.name):
            raise ConfigError(f"--name {job.name!r}: Ray names jobs with letters, digits and ./_- alone; choose such.")
        own = ("--submission-id", job.name, "--no-wait")
        return ("ray", "job", "submit", *self._where(), *own, "--", job.python, str(file.absolute()))

    def status(self, job: Submitted) -> Sequence[str]:
        return ("ray", "job", "status", *self._where(), job.id)

    def logs(self, job: Submitted) -> Sequence[str]:
        return ("ray", "job", "logs", *self._where(), job.id)

    def cancel(self, job: Submitted) -> Sequence[str]:
        return ("ray", "job", "stop", *self._where(), job.id)

    def _where(self) -> list[str]:
        return ["--address", self.options.address] if self.options.address else []


SCRIPT = '''\
"""{mark} ray."""

import json
import os
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

JOB = json.loads({told})
FINAL = (0, 2, 3, {interrupted})
APART = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"
"""Ray kills an actor's children and process group with it; others see the end of stdin, save and stop."""


@ray.remote
class Node:
    """The processes of a node; if this actor ends, they save and stop."""

    def address(self):
        return ray.util.get_node_ip_address()

    def run(self, rank, address):
        own = {{"PET_NODE_RANK": str(rank), "PET_MASTER_ADDR": address}}
        started = subprocess.Popen(
            [sys.executable, "-c", APART, *JOB["command"]],
            cwd=JOB["folder"],
            env={{**os.environ, **JOB["environment"], **own}},
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        return started.wait()


def attempt():
    """Train once; the code of the node that failed first, and 1 if a node is gone."""
    bundle = JOB["bundle"]
    group = placement_group([bundle] * JOB["nodes"], strategy="STRICT_SPREAD")
    ray.get(group.ready())
    own = {{"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0)}}
    nodes = [
        Node.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, index), **own).remote()
        for index in range(JOB["nodes"])
    ]
    try:
        address = ray.get(nodes[0].address.remote())
        waiting, codes = [node.run.remote(rank, address) for rank, node in enumerate(nodes)], []
        while waiting:
            done, waiting = ray.wait(waiting)
            codes += ray.get(done)
            if codes[-1] not in (0, {interrupted}):
                return codes[-1]
        return max(codes)
    except ray.exceptions.RayActorError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        for node in nodes:
            ray.kill(node)
        remove_placement_group(group)


ray.init()
failures = 0
while True:
    code = attempt()
    if code == {interrupted} and JOB["requeue"]:
        continue
    failures += 1
    if code in FINAL or failures > JOB["max_restarts"]:
        sys.exit(code)
'''
