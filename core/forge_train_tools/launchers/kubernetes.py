"""Kubernetes: a TrainJob of Kubeflow's trainer with a runtime of its own, or a plain JobSet.

Both have one job with a pod for each node. A pod that fails or is drained is made again by itself, and the ranks of the
others start again inside theirs; only an interruption after saving makes all of them anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

from forge_train.base.errors import INTERRUPTED, ConfigError, DivergedError
from forge_train.config.schema import section

from .job import ClusterJob
from .launcher import MARK, Launcher, Submitted, file_name

POD = "node"
"""Name of the replicated job and of its container, as the trainer's own runtimes have it."""
SAVING = 300
"""Seconds that ranks have to save after SIGTERM."""
INDEX = "batch.kubernetes.io/job-completion-index"
GROUP = "trainer.kubeflow.org"
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?")
"""RFC 1035, with room for what JobSet appends to the names of its pods."""
_CLAIM = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_LABEL = re.compile(r"([a-z0-9.-]+/)?[A-Za-z0-9]([-\w.]*[A-Za-z0-9])?", re.ASCII)


@section
class KubernetesOptions:
    """The table `[launch.k8s]`."""

    kind: Literal["trainjob", "jobset"] = "trainjob"
    """Asks for a TrainJob of Kubeflow's trainer (v2), or for a plain JobSet."""
    namespace: str = ""
    """The namespace; empty takes kubectl's own."""
    gang: Literal["kueue", "volcano"] = "kueue"
    """Has the queue admit all pods at once, or none."""
    gpu_resource: str = "nvidia.com/gpu"
    """Resource of which each process takes one."""
    node_labels: dict[str, str] = field(default_factory=dict)
    """Labels that nodes must have."""


class Kubernetes(Launcher):
    """Writes `NAME.k8s.json`; uses kubectl."""

    Options = KubernetesOptions
    options: KubernetesOptions

    def files(self, job: ClusterJob) -> Mapping[str, str]:
        self._check(job)
        items = list(self._trainjob(job) if self.options.kind == "trainjob" else self._plain(job))
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=2, ensure_ascii=False)
        return {f"{file_name(job.name)}.k8s.json": text + "\n"}

    def submit(self, job: ClusterJob, file: Path) -> Sequence[str]:
        return ("kubectl", *self._where(), "create", "-f", str(file.absolute()))

    def status(self, job: Submitted) -> Sequence[str]:
        pods = f"pods,{self.options.kind}s.{self._api()}"
        return ("kubectl", *self._where(), "get", pods, "-l", f"forge-train/job={job.id}", "-o", "wide")

    def logs(self, job: Submitted) -> Sequence[str]:
        chosen = f"forge-train/job={job.id},{INDEX}=0"
        return ("kubectl", *self._where(), "logs", "-l", chosen, "-c", POD, "--tail=-1")

    def cancel(self, job: Submitted) -> Sequence[str]:
        kinds = f"{self.options.kind}s.{self._api()}"
        kinds += f",trainingruntimes.{GROUP}" if self.options.kind == "trainjob" else ""
        return ("kubectl", *self._where(), "delete", kinds, "-l", f"forge-train/job={job.id}")

    def _api(self) -> str:
        return GROUP if self.options.kind == "trainjob" else "jobset.x-k8s.io"

    def _where(self) -> list[str]:
        return ["-n", self.options.namespace] if self.options.namespace else []

    def _check(self, job: ClusterJob) -> None:
        machines, own = job.machines, self.options
        if not _NAME.fullmatch(job.name):
            raise ConfigError(
                f"--name {job.name!r}: Kubernetes names jobs with at most 47 lower-case letters, digits and -, with a "
                "letter first; choose such a --name."
            )
        if not machines.image:
            raise ConfigError("--image: pods run an image; name one that has Forge.")
        for what, name in (("--namespace", own.namespace), ("--queue", machines.queue)):
            if name and not _CLAIM.fullmatch(name):
                raise ConfigError(f"{what} {name!r}: is no name of Kubernetes: lower-case letters, digits and -.")
        for name, value in own.node_labels.items():
            if not _LABEL.fullmatch(name) or (value and not _LABEL.fullmatch(value)) or len(value) > 63:
                raise ConfigError(f"--node-labels {name}={value}: is no label of Kubernetes.")
        for mount in job.mounts:
            if not (mount.source.startswith("/") or _CLAIM.fullmatch(mount.source)):
                raise ConfigError(
                    f"--mounts {mount.source}:{mount.target}: expected the name of a PersistentVolumeClaim, or a path "
                    "of the nodes that begins with /."
                )
        if machines.account:
            raise ConfigError(f"--account {machines.account}: has no effect on Kubernetes; --queue does.")
        if machines.gpu and own.gpu_resource != "nvidia.com/gpu":
            raise ConfigError(
                f"--gpu {machines.gpu}: only nodes with NVIDIA's GPUs have a label for it; use --node-labels."
            )

    def _meta(self, job: ClusterJob, **more: Any) -> dict[str, Any]:
        labels = {"forge-train/job": job.name}
        return {"annotations": {"forge-train/about": f"{MARK} k8s."}, "name": job.name, "labels": labels, **more}

    def _queued(self, job: ClusterJob) -> dict[str, str]:
        kueue = job.machines.queue and self.options.gang == "kueue"
        return {"kueue.x-k8s.io/queue-name": job.machines.queue} if kueue else {}

    def _trainjob(self, job: ClusterJob) -> Iterator[dict[str, Any]]:
        """A runtime with our pods and policies, and the job that uses it; the trainer sets torchrun's variables."""
        machines = job.machines
        volcano = machines.queue and self.options.gang == "volcano"
        meta = self._meta(job)
        yield {
            "apiVersion": f"{GROUP}/v1alpha1",
            "kind": "TrainingRuntime",
            "metadata": {**meta, "labels": {**meta["labels"], f"{GROUP}/framework": "torch"}},
            "spec": {
                "mlPolicy": {"numNodes": machines.nodes, "torch": {}},
                **({"podGroupPolicy": {"volcano": {}}} if volcano else {}),
                "template": {"spec": self._jobset(job, {})},
            },
        }
        yield {
            "apiVersion": f"{GROUP}/v1alpha1",
            "kind": "TrainJob",
            "metadata": {**meta, "labels": {**meta["labels"], **self._queued(job)}},
            "spec": {
                "runtimeRef": {"apiGroup": GROUP, "kind": "TrainingRuntime", "name": job.name},
                "trainer": {"numNodes": machines.nodes, "numProcPerNode": machines.nproc},
                **({"suspend": True} if self._queued(job) else {}),  # until Kueue admits it
            },
        }

    def _plain(self, job: ClusterJob) -> Iterator[dict[str, Any]]:
        machines = job.machines
        own: dict[str, Any] = {
            "PET_NNODES": str(machines.nodes),
            "PET_NPROC_PER_NODE": str(machines.nproc),
            "PET_NODE_RANK": {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}},
            "PET_MASTER_ADDR": f"{job.name}-{POD}-0-0.{job.name}",
            "PET_MASTER_PORT": str(job.port),
        }
        meta = self._meta(job)
        yield {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {**meta, "labels": {**meta["labels"], **self._queued(job)}},
            "spec": {
                "network": {"enableDNSHostnames": True, "subdomain": job.name, "publishNotReadyAddresses": True},
                **self._jobset(job, own),
            },
        }

    def _jobset(self, job: ClusterJob, own: Mapping[str, Any]) -> dict[str, Any]:
        """A JobSetSpec of one job. Its failures are told apart by the message that names the exit code."""
        machines = job.machines
        final = [ConfigError.code, DivergedError.code]
        rules = [
            {
                "name": "mistake",
                "action": "FailJobSet",
                "onJobFailureReasons": ["PodFailurePolicy"],
                "onJobFailureMessagePatterns": [f"exit code ({'|'.join(map(str, final))}) "],
            },
            {
                "name": "interrupted",
                "action": "RestartJobSetAndIgnoreMaxRestarts" if machines.requeue else "FailJobSet",
                "onJobFailureReasons": ["PodFailurePolicy"],
            },
        ]
        codes = {"containerName": POD, "operator": "In", "values": [*final, INTERRUPTED]}
        spec = {
            "parallelism": machines.nodes,
            "completions": machines.nodes,
            "completionMode": "Indexed",
            "backoffLimit": machines.max_restarts,
            **({"activeDeadlineSeconds": job.seconds} if job.seconds else {}),
            "podFailurePolicy": {
                "rules": [
                    {"action": "FailJob", "onExitCodes": codes},
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                ]
            },
            "template": self._pod(job, own),
        }
        step = {f"{GROUP}/trainjob-ancestor-step": "trainer"} if self.options.kind == "trainjob" else {}
        template = {"metadata": {"labels": step}, "spec": spec}
        return {
            "failurePolicy": {"maxRestarts": machines.max_restarts, "rules": rules},
            "replicatedJobs": [{"name": POD, "replicas": 1, "template": template}],
        }

    def _pod(self, job: ClusterJob, own: Mapping[str, Any]) -> dict[str, Any]:
        """The template of pods. Kubernetes puts a variable for `$(NAME)` in commands and values; `$$` is a `$`."""
        machines = job.machines
        env = [{"name": name, "value": _literal(value)} for name, value in machines.env.items()]
        env += [
            {"name": name, **({"value": value} if isinstance(value, str) else {"valueFrom": value})}
            for name, value in own.items()
        ]
        asked = {
            **({self.options.gpu_resource: str(machines.nproc)} if job.gpus else {}),
            **({"cpu": str(machines.cpus * machines.nproc)} if machines.cpus else {}),
            **({"memory": f"{machines.memory}Gi"} if machines.memory else {}),
        }
        shared = {"name": "shm", "emptyDir": {"medium": "Memory"}}  # the default /dev/shm has 64 MB
        sources = list(dict.fromkeys(mount.source for mount in job.mounts))
        labels = dict(self.options.node_labels)
        if machines.gpu:
            labels["nvidia.com/gpu.product"] = machines.gpu
        volcano = machines.queue and self.options.gang == "volcano"
        annotations = {
            "scheduling.volcano.sh/queue-name": machines.queue,
            "scheduling.volcano.sh/group-min-member": str(machines.nodes),
        }
        return {
            "metadata": {"labels": {"forge-train/job": job.name}, **({"annotations": annotations} if volcano else {})},
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": SAVING,
                **({"schedulerName": "volcano"} if volcano else {}),
                **({"nodeSelector": labels} if labels else {}),
                "containers": [
                    {
                        "name": POD,
                        "image": machines.image,
                        "command": [_literal(word) for word in job.node_command],
                        "workingDir": str(job.folder),
                        "env": env,
                        "resources": {"limits": asked, "requests": asked},
                        "volumeMounts": [
                            {"name": "shm", "mountPath": "/dev/shm"},
                            *(
                                {
                                    "name": f"mount-{sources.index(mount.source)}",
                                    "mountPath": mount.target,
                                    "readOnly": mount.read_only,
                                }
                                for mount in job.mounts
                            ),
                        ],
                    }
                ],
                "volumes": [shared, *({"name": f"mount-{at}", **_volume(one)} for at, one in enumerate(sources))],
            },
        }


def _volume(source: str) -> dict[str, Any]:
    if source.startswith("/"):
        return {"hostPath": {"path": source}}
    return {"persistentVolumeClaim": {"claimName": source}}


def _literal(text: str) -> str:
    return text.replace("$", "$$")
