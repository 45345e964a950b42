"""Launchers: their files fit the engines' schemas, hold what was typed as it was typed, and anyone may add one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jsonschema
import pytest
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from forge_cli import DECODER, forge
from forge_train import ConfigError
from forge_train_tools.launchers.job import ClusterJob, Machines
from forge_train_tools.launchers.kubernetes import Kubernetes, KubernetesOptions
from forge_train_tools.launchers.launcher import Launcher, Submitted
from forge_train_tools.launchers.ray import Ray, RayOptions
from forge_train_tools.launchers.skypilot import SkyPilot, SkyPilotOptions

pytestmark = pytest.mark.unit
SCHEMAS = {file.name: json.loads(file.read_text()) for file in (Path(__file__).parents[1] / "schemas").glob("*.json")}
KNOWN: Any = Registry().with_resources((name, DRAFT202012.create_resource(one)) for name, one in SCHEMAS.items())
HOSTILE = ("$(touch bad)", "`touch bad`", "'; touch bad; '", "a\ntouch bad\n", "$$(HOME) $HOME", 'é "\\ {{x}} %s')
PLACES = {"image": "team/forge:1", "mounts": ("claim:/shared", "/data:/data:ro")}


def check(value: object, schema: str) -> None:
    jsonschema.Draft202012Validator(SCHEMAS[schema], registry=KNOWN).validate(value)


def job(*arguments: str, name: str = "mine", gpus: bool = True, **machines: Any) -> ClusterJob:
    asked = Machines(**{"nodes": 2, "nproc": 4, **machines})
    return ClusterJob(name, asked, ("train", *arguments), Path("/shared"), Path("/shared/runs"), gpus=gpus)


def objects(asked: ClusterJob, **options: Any) -> list[dict[str, Any]]:
    (text,) = Kubernetes(KubernetesOptions(**options)).files(asked).values()
    found: list[dict[str, Any]] = json.loads(text)["items"]
    return found


def jobset(items: list[dict[str, Any]]) -> dict[str, Any]:
    first = items[0]["spec"]
    found: dict[str, Any] = first["template"]["spec"] if "template" in first else first
    return found


def pod(items: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = jobset(items)["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return found


FULL = {"time": "24:00:00", "gpu": "H100", "cpus": 12, "memory": 900, "queue": "gpus", "max_restarts": 3}


@pytest.mark.parametrize("gang", ["kueue", "volcano"])
@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
@pytest.mark.parametrize(
    "more", [{}, FULL, {"requeue": False}, {"env": {"A": "$(B)"}}], ids=["plain", "full", "once", "env"]
)
def test_objects_of_kubernetes(kind: str, gang: str, more: dict[str, Any]) -> None:
    items = objects(job(**PLACES, **more), kind=kind, gang=gang, node_labels={"zone": "a"})
    for one in items:
        check(one, f"{kind}.json")
    own = pod(items)
    assert [one["name"] for one in own["volumes"]] == ["shm", "mount-0", "mount-1"]
    assert [(one["mountPath"], one.get("readOnly")) for one in own["containers"][0]["volumeMounts"]] == [
        ("/dev/shm", None), ("/shared", False), ("/data", True)
    ]  # fmt: skip
    limits = own["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == "4"
    if more is FULL:
        assert (limits["cpu"], limits["memory"]) == ("48", "900Gi")
        assert own["nodeSelector"] == {"zone": "a", "nvidia.com/gpu.product": "H100"}
        queued = items[-1]["metadata"]["labels"].get("kueue.x-k8s.io/queue-name")
        assert (queued, own.get("schedulerName")) == (("gpus", None) if gang == "kueue" else (None, "volcano"))


def test_a_schema_refuses_what_the_engine_would() -> None:
    items = objects(job(**PLACES), kind="jobset")
    for change in (
        lambda one: one["spec"].update(network={"enableDNSHostname": True}),
        lambda one: one["metadata"].update(name="No Name"),
        lambda one: pod([one])["containers"][0].update(comand=["x"]),
        lambda one: pod([one]).update(restartPolicy="OnFailure"),
    ):
        (broken,) = json.loads(json.dumps(items))
        change(broken)
        with pytest.raises(jsonschema.ValidationError):
            check(broken, "jobset.json")


@pytest.mark.parametrize(
    ("code", "requeue", "action"),
    [(2, True, "FailJobSet"), (3, True, "FailJobSet"), (75, True, "RestartJobSetAndIgnoreMaxRestarts"),
     (75, False, "FailJobSet"), (1, True, "RestartJobSet"), (137, True, "RestartJobSet")],
)  # fmt: skip
def test_what_kubernetes_does_after_an_exit(code: int, requeue: bool, action: str) -> None:
    """A pod's end, by the documented rules: of its job first, and of the JobSet for the job's reason and message."""
    spec = jobset(objects(job(**PLACES, requeue=requeue), kind="jobset"))
    rules = spec["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    at = next((at for at, rule in enumerate(rules) if code in rule.get("onExitCodes", {}).get("values", ())), None)
    reason = "BackoffLimitExceeded" if at is None else "PodFailurePolicy"
    message = (
        f"Container node for pod default/mine-node-0-0 failed with exit code {code} matching FailJob rule at index {at}"
    )
    found = next(
        (
            rule["action"]
            for rule in spec["failurePolicy"]["rules"]
            if reason in rule["onJobFailureReasons"]
            and any(re.search(one, message) for one in rule.get("onJobFailureMessagePatterns", [""]))
        ),
        "RestartJobSet",
    )
    assert found == action


def expanded(text: str, environment: Mapping[str, str]) -> str:
    """A command or value as Kubernetes gives it to a container: `$(NAME)` is a variable, `$$` a `$`."""
    return re.sub(
        r"\$\$|\$\((\w+)\)",
        lambda found: "$" if found[0] == "$$" else environment.get(found[1], found[0]),
        text,
    )


@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
def test_a_pod_gets_what_was_typed(kind: str) -> None:
    container = pod(objects(job(*HOSTILE, **PLACES, env={"OWN": "".join(HOSTILE)}), kind=kind))["containers"][0]
    around = {"HOME": "/root", "OWN": "x"}
    words = [expanded(word, around) for word in container["command"]]
    assert words == ["python", "-m", "forge_train_tools.launching.node", "--", "train", *HOSTILE]
    given = {one["name"]: one for one in container["env"]}
    assert expanded(given["OWN"]["value"], around) == "".join(HOSTILE)
    assert ("PET_NODE_RANK" in given) is (kind == "jobset"), "Kubeflow's trainer sets torchrun's variables itself"
    if kind == "jobset":
        assert given["PET_MASTER_ADDR"]["value"] == "mine-node-0-0.mine"


@pytest.mark.parametrize("more", [{}, FULL | {"queue": ""}, {"requeue": False}], ids=["plain", "full", "once"])
def test_a_task_of_skypilot(more: dict[str, Any]) -> None:
    asked = job(image="i", mounts=("s3://runs:/shared", "/data:/data"), env={"A": "1"}, **{"gpu": "H100", **more})
    ((name, text),) = SkyPilot(SkyPilotOptions(infra="k8s/ours", spot=True, labels={"a": "b"})).files(asked).items()
    assert name == "mine.sky.yaml"
    first, _, rest = text.partition("\n")
    assert first == "# Written by forge launch skypilot."
    task = json.loads(rest)
    check(task, "skypilot.json")
    assert task["resources"]["accelerators"] == {"H100": 4}
    assert task["file_mounts"] == {"/shared": {"source": "s3://runs", "mode": "MOUNT"}, "/data": "/data"}
    codes = task["resources"]["job_recovery"].get("recover_on_exit_codes")
    assert codes == ([75] if more.get("requeue", True) else None)


TELL = "import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], open('told.json', 'w'))"


def test_the_script_of_skypilot(tmp_path: Path) -> None:
    folder = tmp_path / "a $(touch bad) '"
    folder.mkdir()
    (tmp_path / "python").write_text(f'#!/bin/bash\nexec {sys.executable} -c "{TELL}" "$@"\n', encoding="utf-8")
    (tmp_path / "python").chmod(0o755)
    machines = Machines(nodes=2, nproc=4, python=str(tmp_path / "python"))
    asked = ClusterJob("mine", machines, ("train", *HOSTILE), folder, folder / "runs", gpus=False)
    (text,) = SkyPilot(SkyPilotOptions(packages=("a; touch bad",))).files(asked).values()
    task = json.loads(text.partition("\n")[2])
    own = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    for script, words in (
        (task["run"], ["-m", "forge_train_tools.launching.node", "--", "train", *HOSTILE]),
        (task["setup"], ["-m", "pip", "install", "--", "a; touch bad"]),
    ):
        subprocess.run(["bash", "-c", script], env={**os.environ, **own}, cwd=folder, check=True)
        arguments, environment = json.loads((folder / "told.json").read_text(encoding="utf-8"))
        assert arguments == words
        if "node" in words[1]:
            found = {key: value for key, value in environment.items() if key.startswith("PET_")}
            assert found == {
                "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "4", "PET_MASTER_ADDR": "10.0.0.1",
                "PET_MASTER_PORT": str(asked.port),
            }  # fmt: skip
    assert not [*tmp_path.rglob("bad")]


class FakeRay(types.ModuleType):
    """Ray's calls, as its reference describes them, in this process: an actor is an object, a reference its answer."""

    exceptions = types.SimpleNamespace(RayActorError=type("RayActorError", (Exception,), {}))
    util = types.SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")

    def __init__(self) -> None:
        super().__init__("ray")
        self.groups: list[Any] = []
        self.removed = 0

    def init(self) -> None: ...

    def remote(self, kind: type) -> Any:
        def made() -> Any:
            one = kind()

            def call(name: str) -> Any:
                return types.SimpleNamespace(remote=getattr(one, name))

            return types.SimpleNamespace(address=call("address"), run=call("run"))

        return types.SimpleNamespace(options=lambda **_: types.SimpleNamespace(remote=made))

    def get(self, given: Any) -> Any:
        return given

    def wait(self, waiting: list[Any]) -> tuple[list[Any], list[Any]]:
        return waiting[:1], waiting[1:]

    def kill(self, one: Any) -> None: ...

    def placement_group(self, bundles: list[Any], strategy: str) -> Any:
        self.groups.append((bundles, strategy))
        return types.SimpleNamespace(ready=lambda: None)

    def remove_placement_group(self, group: Any) -> None:
        self.removed += 1


def run_on_ray(text: str) -> tuple[FakeRay, int]:
    ray = FakeRay()
    strategies = types.SimpleNamespace(PlacementGroupSchedulingStrategy=lambda group, index: index)
    modules: Any = {
        "ray": ray, "ray.util": ray.util, "ray.util.placement_group": ray, "ray.util.scheduling_strategies": strategies
    }  # fmt: skip
    with patch.dict(sys.modules, modules), pytest.raises(SystemExit) as ended:
        exec(compile(text, "mine.ray.py", "exec"), {"__name__": "__main__"})
    return ray, int(ended.value.code or 0)


ENDS = """
import json, os, sys
with open("told", "a") as out:
    out.write(json.dumps([sys.argv[1:], dict(os.environ)]) + "\\n")
attempt = sum(json.loads(line)[1]["PET_NODE_RANK"] == "0" for line in open("told"))
sys.exit(int([*open("codes").read().split(), 0][attempt - 1]) if os.environ["PET_NODE_RANK"] == "0" else 0)
"""
"""A node; node 0 ends each attempt with the next code of a file."""


@pytest.mark.parametrize(
    ("codes", "code", "attempts"),
    [("0 0", 0, 1), ("1 0", 0, 2), ("1 1 1", 1, 3), ("2", 2, 1), ("75 0", 0, 2), ("75 75 1 0", 0, 4)],
)
def test_the_script_of_ray(tmp_path: Path, codes: str, code: int, attempts: int) -> None:
    """Both nodes get their places and what was typed; a failure is tried again twice, an interruption always."""
    (tmp_path / "codes").write_text(codes, encoding="utf-8")
    (tmp_path / "python").write_text(f"#!{sys.executable}\n{ENDS}", encoding="utf-8")
    (tmp_path / "python").chmod(0o755)
    machines = Machines(nodes=2, nproc=4, cpus=3, memory=2, gpu="H100", max_restarts=2, python=str(tmp_path / "python"),
                        env={"OWN": "".join(HOSTILE)})  # fmt: skip
    asked = ClusterJob("mine", machines, ("train", *HOSTILE), tmp_path, tmp_path / "runs")
    (text,) = Ray(RayOptions()).files(asked).values()
    ray, ended = run_on_ray(text)
    assert (ended, len(ray.groups), ray.removed) == (code, attempts, attempts)
    bundle = {"CPU": 12, "GPU": 4, "accelerator_type:H100": 0.001, "memory": 2 << 30}
    assert ray.groups[0] == ([bundle, bundle], "STRICT_SPREAD")
    for line in (tmp_path / "told").read_text(encoding="utf-8").splitlines():
        arguments, environment = json.loads(line)
        assert arguments == ["-m", "forge_train_tools.launching.node", "--follow-stdin", "--", "train", *HOSTILE]
        assert environment["OWN"] == "".join(HOSTILE)
        assert environment["PET_MASTER_ADDR"] == "10.0.0.1"


@pytest.mark.parametrize(
    ("launcher", "asked", "says"),
    [
        (Kubernetes(KubernetesOptions()), {"name": "$(touch bad)", **PLACES}, "--name '$(touch bad)': Kubernetes"),
        (Kubernetes(KubernetesOptions()), {"name": "a" * 48, **PLACES}, "at most 47 lower-case letters"),
        (Kubernetes(KubernetesOptions()), {}, "--image: pods run an image; name one that has Forge."),
        (Kubernetes(KubernetesOptions()), {**PLACES, "mounts": ("My_Claim:/shared",)}, "PersistentVolumeClaim"),
        (Kubernetes(KubernetesOptions()), {**PLACES, "account": "a"}, "--account a: has no effect on Kubernetes"),
        (Kubernetes(KubernetesOptions()), {**PLACES, "queue": "a b"}, "--queue 'a b': is no name of Kubernetes"),
        (Kubernetes(KubernetesOptions(namespace="-x")), PLACES, "--namespace '-x': is no name of Kubernetes"),
        (Kubernetes(KubernetesOptions(node_labels={"a b": "c"})), PLACES, "--node-labels a b=c: is no label"),
        (Kubernetes(KubernetesOptions(gpu_resource="amd.com/gpu")), {**PLACES, "gpu": "X"}, "--gpu X: only nodes with"),
        (SkyPilot(SkyPilotOptions()), {}, "--gpu: SkyPilot finds machines by the kind of GPU, like H100; name it."),
        (SkyPilot(SkyPilotOptions()), {"gpu": "H100", "queue": "q"}, "--queue: has no effect with SkyPilot"),
        (SkyPilot(SkyPilotOptions()), {"gpu": "H100", "name": "a b"}, "--name 'a b': SkyPilot names jobs with"),
        (Ray(RayOptions()), {"image": "i", "mounts": ("/s:/shared",)}, "--image: has no effect with Ray"),
    ],
)  # fmt: skip
def test_what_is_refused(launcher: Launcher, asked: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        launcher.files(job(**asked))
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_ray_takes_no_path_that_its_shell_would_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Ray passes this path through a shell"):
        Ray(RayOptions()).submit(job(), tmp_path / "$(touch bad)" / "mine.ray.py")


@pytest.mark.parametrize("launcher", [Kubernetes(KubernetesOptions(namespace="ours")), SkyPilot(SkyPilotOptions()),
                                      Ray(RayOptions(address="http://head:8265"))])  # fmt: skip
def test_commands_of_clients(launcher: Launcher) -> None:
    """Each names the job, and says where it is."""
    done = Submitted("mine", "mine", Path("/shared"))
    submit = launcher.submit(job(python="python"), Path("/jobs/mine"))
    assert submit[-1] == "/jobs/mine"
    where = {"kubectl": ["-n", "ours"], "sky": [], "ray": ["--address", "http://head:8265"]}[submit[0]]
    for command in (submit, launcher.status(done), launcher.logs(done), launcher.cancel(done)):
        assert command[0] == submit[0]
        assert set(where) <= set(command)
        assert any("mine" in word for word in command) or command == ("sky", "jobs", "queue")


OURS = '''
from forge_train.config.schema import section
from forge_train_tools.launchers.launcher import Launcher, MARK

@section
class Ours(object):
    site: str = "home"
    """The site."""

class Site(Launcher):
    """Writes `NAME.site`."""
    Options = Ours

    def files(self, job):
        return {f"{job.name}.site": f"{MARK} site: {self.options.site} {job.world} {job.command[-1]}\\n"}

    def submit(self, job, file):
        return ("cat", str(file))

    def submitted(self, job, said):
        return said.split()[5]

    def status(self, job):
        return ("echo", job.id, "runs")

class Half(Launcher):
    def files(self, job):
        return {}
'''


def test_a_launcher_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has all that ours have: options from its section, the checks, the files, submitting and asking."""
    (tmp_path / "our_site.py").write_text(OURS, encoding="utf-8")
    info = tmp_path / "our_site-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: our-site\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(
        "[forge_train.launchers]\nsite = our_site:Site\nhalf = our_site:Half\n", encoding="utf-8"
    )
    (tmp_path / "tiny.toml").write_text(DECODER, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert "site      from our_site" in forge("launch", "--help").out
    assert "--site VALUE" in forge("launch", "site", "--help").out
    assert "--cancel" not in forge("launch", "site", "--help").out, "it can't"
    written = forge("launch", "site", "tiny.toml", "--nproc", "2", "--site", "x", "--submit")
    assert written.out == "Wrote tiny.site.\nSubmitted as job x.\n", written.err
    assert (tmp_path / "tiny.site").read_text() == "Written by forge launch site: x 2 tiny\n"
    assert forge("launch", "site", "tiny.toml", "--status").out == "x runs\n"
    wrong = forge("launch", "site", "tiny.toml", "--nproc", "3")
    assert (wrong.code, "train.global_batch" in wrong.err) == (2, True)
    unknown = forge("launch", "sitee")
    assert (unknown.code, "There is no launcher 'sitee'. Did you mean 'site'?" in unknown.err) == (2, True)
    half = forge("launch", "half", "tiny.toml", "--nproc", "2")
    assert (half.code, "The launcher 'half': our_site:Half lacks submit." in half.err) == (2, True), half.err
