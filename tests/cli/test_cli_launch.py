"""`forge launch slurm`: what the script says, and when it queues its job again. Slurm is stand-ins on the PATH."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forge_command import Forge
from forge_train import ConfigError
from forge_train_tools.launchers.job import ClusterJob, Machines
from forge_train_tools.launchers.slurm import Slurm, SlurmOptions

ASKED = ("--nodes", "2", "--nproc", "1", "--time", "1:00:00")
BATCH = ("-s", "train.global_batch=4")


def stand_in(folder: Path, **scripts: str) -> dict[str, str]:
    """An environment in which these programs are scripts."""
    folder.mkdir(exist_ok=True)
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "42"}


def test_the_script(forge: Forge, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_SET", "train.global_batch=4; log.every=2")
    more = (
        "--queue",
        "gpu",
        "--sbatch",
        "exclusive",
        "--sbatch",
        "job-name=two words",
        "-p",
        "lion",
        "-s",
        "run.device=cpu",
    )
    said = forge("launch", "slurm", "tiny.toml", *ASKED, *more, "--run-dir", "my runs").out
    assert said == "Wrote tiny.sbatch.\nSubmit it with: sbatch --parsable " + str(folder / "tiny.sbatch") + "\n"
    text = (folder / "tiny.sbatch").read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if line.startswith("#SBATCH")] == [
        '#SBATCH --job-name="two words"',
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --time=1:00:00",
        "#SBATCH --partition=gpu",
        "#SBATCH --signal=USR1@300",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --output=%x-%j.log",
        "#SBATCH --exclusive",
    ]
    assert (
        "forge_train_cli train tiny.toml --plugins lion,signals --set train.global_batch=4 --set log.every=2 " in text
    )
    assert " --set run.device=cpu --run-dir 'my runs' --name tiny || code=$?\n" in text
    assert f"\ncd {folder} || exit\n" in text


def test_the_script_of_a_folder(forge: Forge, folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**shape, vocab_size=300)).save_pretrained(folder / "hf")
    values = ("-s", f"text.path={folder / 'tiny.toml'}", "-s", "train.global_batch=4", "-s", "train.micro_batch=1")
    forge("launch", "slurm", "--from", "hf", *ASKED, *values)
    text = (folder / "hf.sbatch").read_text(encoding="utf-8")
    assert f"forge_train_cli train --from {folder / 'hf'} --plugins signals --set text.path=" in text
    assert " --name hf || code=$?\n" in text


def test_gpus(forge: Forge, folder: Path) -> None:
    def gpus(*more: str) -> list[str]:
        forge("launch", "slurm", "tiny.toml", *ASKED, *BATCH, *more)
        text = (folder / "tiny.sbatch").read_text(encoding="utf-8")
        return [line for line in text.splitlines() if line.startswith("#SBATCH") and "gpu" in line]

    assert gpus() == ["#SBATCH --gpus-per-node=1"]
    assert gpus("--sbatch", "gres=gpu:a100:1") == ["#SBATCH --gres=gpu:a100:1"]
    assert gpus("-s", "run.device=cpu") == []


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--time", "soon"), "--time 'soon': expected minutes, [days-]hours:minutes:seconds or days-hours."),
        (
            ("--sbatch", "partition gpu"),
            "--sbatch partition gpu='': expected an option of sbatch, like constraint=h100.",
        ),
        (("--sbatch", "nodes=3"), "--sbatch nodes: say it with --nodes."),
        (("--sbatch", "partition=x"), "--sbatch partition: say it with --queue."),
        (("--sbatch", "J=other"), "--sbatch J: expected the long name of the option, like exclusive."),
        (("--sbatch", "signal=TERM@60"), "--sbatch signal: the script relies on its own --signal=USR1@300."),
        (("--sbatch", "no-requeue"), "--sbatch no-requeue: the script relies on its own --requeue."),
        (("--time", "00:02:00"), "--time 00:02:00: is 120 s. Jobs are told to stop 300 s before the limit"),
        (("-s", "parallel.tp=3"), "= 3, but there are 2 processes."),
        (("-s", "train.global_batch=3"), "train.global_batch: 3 is not a multiple of"),
        (("--submit",), "There is no squeue here. Submit it where there is one: squeue --me"),
    ],
)
def test_what_is_refused(
    forge: Forge, folder: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], says: str
) -> None:
    monkeypatch.setenv("PATH", str(folder))
    before = (folder / "tiny.toml").read_text(encoding="utf-8")
    assert says in forge("launch", "slurm", "tiny.toml", *ASKED, *BATCH, *more, fails=2).err
    assert (folder / "tiny.toml").read_text(encoding="utf-8") == before
    assert (folder / "tiny.sbatch").exists() is (more == ("--submit",))


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("9", 540), ("9:59", 599), ("0:09:59", 599), ("0-0", None), ("0-00:10", None), ("1-0", None), ("10", None)],
)
def test_how_short_a_limit_may_be(tmp_path: Path, time: str, seconds: int | None) -> None:
    said = f"is {seconds} s. .* at least 600 s"
    with pytest.raises(ConfigError, match=said) if seconds else contextlib.nullcontext():
        script(job(tmp_path, time=time))


def test_submitting(forge: Forge, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = stand_in(folder / "bin", sbatch='echo "$*" > asked; echo "42;cluster"', squeue="exit 0")
    monkeypatch.setenv("PATH", env["PATH"])
    (folder / "jobs").mkdir()
    said = forge("launch", "slurm", "tiny.toml", *ASKED, *BATCH, "-o", "jobs", "--submit").out
    assert said == "Wrote jobs/tiny.sbatch.\nSubmitted as job 42.\n"
    assert (folder / "asked").read_text(encoding="utf-8") == f"--parsable {folder / 'jobs' / 'tiny.sbatch'}\n"
    stand_in(folder / "bin", sbatch='echo "sbatch: error: invalid partition specified: x" >&2; exit 1')
    refused = forge("launch", "slurm", "tiny.toml", *ASKED, *BATCH, "--submit", fails=1).err
    assert refused == "Error: sbatch refuses tiny.sbatch: sbatch: error: invalid partition specified: x\n"
    stand_in(folder / "bin", squeue='[ "$*" = "--me -h --name=tiny -o %i (%T)" ] && echo "41 (PENDING)"')
    refused = forge("launch", "slurm", "tiny.toml", *ASKED, *BATCH, "--submit", fails=2).err
    assert refused == "Error: There is a job 'tiny' already: 41 (PENDING). Cancel it, or choose another --name.\n"


def test_a_file_of_somebody_else_stays(forge: Forge, folder: Path) -> None:
    (folder / "tiny.sbatch").write_text("mine", encoding="utf-8")
    said = forge("launch", "slurm", "tiny.toml", *ASKED, *BATCH, fails=2).err
    assert "tiny.sbatch exists and is not a file written by forge launch" in said
    shown = forge("launch", "slurm", "tiny.toml", *ASKED, *BATCH, "--dry-run").out
    assert shown.startswith("# tiny.sbatch\n#!/bin/bash\n# Written by forge launch slurm.\n")
    assert (folder / "tiny.sbatch").read_text(encoding="utf-8") == "mine"


def test_what_can_be_done_with_a_job(forge: Forge, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins = {name: f'echo "{name} $*" >> asked; echo 42' for name in ("sbatch", "scancel")}
    env = stand_in(folder / "bin", **stand_ins, squeue='echo "squeue $*" >> asked')
    monkeypatch.setenv("PATH", env["PATH"])
    never = forge("launch", "slurm", "tiny.toml", "--status", fails=2).err
    assert never == f"Error: No job 'tiny' was submitted with slurm from {folder}.\n"
    forge("launch", "slurm", "tiny.toml", *ASKED, *BATCH, "--submit")
    (folder / "asked").unlink()
    forge("launch", "slurm", "--name", "tiny", "--status")
    early = forge("launch", "slurm", "tiny.toml", "--logs", fails=2).err
    assert f"Job 42 has no log tiny-42.log in {folder} yet" in early
    (folder / "tiny-42.log").write_text("step 1\n", encoding="utf-8")
    assert forge("launch", "slurm", "tiny.toml", "--logs").out == "step 1\n"
    assert forge("launch", "slurm", "tiny.toml", "--cancel").out == "42\nCancelled job 42.\n"
    asked = (folder / "asked").read_text(encoding="utf-8").splitlines()
    assert asked == ["squeue --states=all --jobs=42 -o %i %j %T %M of %l on %D nodes %R", "scancel 42"]


def job(folder: Path, *arguments: str, name: str = "a", **machines: Any) -> ClusterJob:
    return ClusterJob(
        name, Machines(**{"nproc": 2, "time": "60", "python": "forge", **machines}), arguments, folder, folder / "runs"
    )


def script(asked: ClusterJob, **options: Any) -> str:
    return next(iter(Slurm(SlurmOptions(**options)).files(asked).values()))


@pytest.mark.parametrize(
    ("code", "state", "again"),
    [(75, "RUNNING", True), (75, "COMPLETING", False), (75, "", True), (0, "RUNNING", False), (3, "RUNNING", False)],
)
def test_when_it_is_queued_again(tmp_path: Path, code: int, state: str, again: bool) -> None:
    """After an interruption, unless somebody cancels the job."""
    env = stand_in(
        tmp_path / "bin",
        srun=f'echo "$*" > tasks; exit {code}',
        squeue=f'[ "$*" = "-h -j 42 -o %T" ] && echo {state}',
        scontrol='echo "$*" > asked',
    )
    done = _bash(tmp_path, script(job(tmp_path, "train", "a b"), sbatch={"exclusive": ""}), env)
    assert (done.returncode, done.stderr) == (code, "")
    said = "--kill-on-bad-exit=0 --wait=300 forge -m forge_train_cli train a b\n"
    assert (tmp_path / "tasks").read_text(encoding="utf-8") == said
    assert (tmp_path / "asked").exists() is again
    if again:
        assert (tmp_path / "asked").read_text(encoding="utf-8") == "requeue 42\n"


def test_a_job_that_is_not_to_be_queued_again(tmp_path: Path) -> None:
    env = stand_in(tmp_path / "bin", srun="exit 75", scontrol="touch asked")
    text = script(job(tmp_path, requeue=False))
    assert "#SBATCH --no-requeue\n" in text
    assert _bash(tmp_path, text, env).returncode == 75
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize(("code", "attempts"), [(1, 3), (137, 3), (2, 1), (0, 1), (75, 1)])
def test_failures_start_the_tasks_again(tmp_path: Path, code: int, attempts: int) -> None:
    env = stand_in(tmp_path / "bin", srun=f"echo x >> tried; exit {code}", squeue="exit 1", scontrol="exit 0")
    assert _bash(tmp_path, script(job(tmp_path, max_restarts=2)), env).returncode == code
    assert (tmp_path / "tried").read_text(encoding="utf-8") == "x\n" * attempts


def test_the_script_outlives_the_signals_of_its_tasks(tmp_path: Path) -> None:
    """Where Slurm sends them to the whole job, the script waits for the tasks to save."""
    srun = 'kill -TERM $PPID; kill -USR1 $PPID; sleep 0.2; echo "$SRUN_CPUS_PER_TASK $OMP_NUM_THREADS" > tasks; exit 75'
    env = stand_in(tmp_path / "bin", srun=srun, squeue="exit 1", scontrol='echo "$*" > asked')
    env = {name: value for name, value in env.items() if name != "OMP_NUM_THREADS"}
    done = _bash(tmp_path, script(job(tmp_path)), {**env, "SLURM_CPUS_PER_TASK": "6"})
    assert done.returncode == 75
    assert (tmp_path / "asked").read_text(encoding="utf-8") == "requeue 42\n"
    assert (tmp_path / "tasks").read_text(encoding="utf-8") == "6 6\n"


HOSTILE = ("$(touch bad)", "`touch bad`", "'; touch bad; '", '"; touch bad; "', "a\ntouch bad\n", "${IFS}*?~!#&|<>\\")


def test_nothing_that_is_typed_runs(tmp_path: Path) -> None:
    """Each text arrives as it was typed, in the arguments and the environment of a task, and nothing else runs."""
    folder = tmp_path / "a $(touch bad) ' \" `touch bad`"
    folder.mkdir()
    variables = {f"V{at}": text for at, text in enumerate(HOSTILE)}
    told = "import os, sys, json; json.dump([sys.argv[1:], dict(os.environ)], open('told.json', 'w'))"
    srun = f'while [[ "$1" == -* ]]; do shift; done\nexec {sys.executable} -c "{told}" "$@"'
    env = stand_in(tmp_path / "bin", srun=srun)
    name = HOSTILE[0] + HOSTILE[1] + HOSTILE[2] + HOSTILE[3]
    text = script(job(folder, "train", *HOSTILE, name=name, env=variables, queue=HOSTILE[3], account=HOSTILE[2]))
    done = _bash(tmp_path, text, env)
    assert (done.returncode, done.stderr) == (0, "")
    arguments, environment = json.loads((folder / "told.json").read_text(encoding="utf-8"))
    assert arguments == ["forge", "-m", "forge_train_cli", "train", *HOSTILE]
    assert {key: environment[key] for key in variables} == variables
    assert {path.name for path in [*tmp_path.iterdir(), *folder.iterdir()]} == {
        "bin", "job.sbatch", folder.name, "told.json"
    }  # fmt: skip
    heads = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    words = [shlex.split(line.removeprefix("#SBATCH ")) for line in heads]
    assert ["--job-name=" + name] in words
    assert all(len(one) == 1 for one in words)


@pytest.mark.parametrize("container", ["pyxis", "apptainer"])
def test_a_container(tmp_path: Path, container: str) -> None:
    """srun gets the image and the mounts whole, whatever they are called."""
    image, source = "registry.example#team/forge:1 $(touch bad)", "/shared/a $(touch bad)"
    env = stand_in(tmp_path / "bin", srun='printf "%s\\n" "$@" > asked')
    asked = job(tmp_path, "train", image=image, mounts=(f"{source}:{tmp_path}", "/data:/data:ro"), env={"A": "1"})
    done = _bash(tmp_path, script(asked, container=container), env)
    assert (done.returncode, done.stderr) == (0, "")
    said = (tmp_path / "asked").read_text(encoding="utf-8").splitlines()[2:]
    command = ["forge", "-m", "forge_train_cli", "train"]
    if container == "pyxis":
        assert said == [
            f"--container-image={image}", f"--container-workdir={tmp_path}",
            f"--container-mounts={source}:{tmp_path},/data:/data:ro", "--container-env=A", *command,
        ]  # fmt: skip
    else:
        assert said == [
            "apptainer", "exec", "--nv", "--pwd", str(tmp_path), "--bind", f"{source}:{tmp_path}:rw",
            "--bind", "/data:/data:ro", image, *command,
        ]  # fmt: skip


def test_an_array(forge: Forge, folder: Path) -> None:
    """Each job of an array is a run of its own, with its values; a mistake in one of them is found before."""
    values = ("--each", "run.seed=1,2", "--each", "train.clip_norm=0.5,1")
    forge("launch", "slurm", "tiny.toml", *ASKED, *BATCH, *values)
    text = (folder / "tiny.sbatch").read_text(encoding="utf-8")
    assert "#SBATCH --array=0-1\n" in text
    assert "#SBATCH --output=%x-%A_%a.log\n" in text
    env = stand_in(folder / "bin", srun='printf "%s\\n" "$@" > asked')
    done = _bash(folder, text, {**env, "SLURM_ARRAY_TASK_ID": "1"})
    assert (done.returncode, done.stderr) == (0, "")
    assert (folder / "asked").read_text(encoding="utf-8").splitlines()[-6:] == [
        "--set", "run.seed=2", "--set", "train.clip_norm=1", "--name", "tiny-1"
    ]  # fmt: skip
    for wrong, says in (("train.clip=1,2", "train.clip: there is no such key."), ("run.seed=1", "clip_norm has 2")):
        assert says in forge("launch", "slurm", "tiny.toml", *ASKED, *BATCH, *values[2:], "--each", wrong, fails=2).err


@pytest.mark.parametrize(
    ("machines", "says"),
    [
        ({"env": {"A B": "1"}}, "--env 'A B': expected a name of letters, digits and _"),
        ({"env": {"A": "\0"}}, "--env A: an environment variable can't hold a zero byte."),
        ({"queue": "-x"}, "--queue: expected a name of printable characters, found '-x'."),
        ({"account": "a\nb"}, "--account: expected a name of printable characters"),
        ({"mounts": ("/a:/b",)}, "--mounts /a:/b: only a container has mounts; name its --image."),
        ({"image": "i", "mounts": ("/a,/c:/b",)}, "--mounts '/a,/c:/b': expected SOURCE:TARGET or SOURCE:TARGET:ro"),
        ({"image": "i", "mounts": ("/a:b",)}, "--mounts '/a:b': expected SOURCE:TARGET"),
        ({"image": "i"}, "lies in no mount, so it would be lost with the container: add --mounts SHARED:"),
    ],
)
def test_machines_that_are_refused(tmp_path: Path, machines: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        job(tmp_path, **machines)
    assert says in str(refused.value)


def test_a_read_only_mount_takes_no_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is mounted read-only; a run writes there"):
        job(tmp_path, image="i", mounts=(f"/a:{tmp_path}", f"/b:{tmp_path}/runs:ro"))


def test_a_job_file(forge: Forge, folder: Path) -> None:
    """What is typed lies over the file; every mistake in it has its line."""
    file = folder / "site.toml"
    file.write_text(
        '[launch]\nnodes = 4\nnproc = 1\ntime = "60"\nenv.A = "from file"\n[launch.slurm.sbatch]\nexclusive = ""\n'
        '[launch.ssh]\nhosts = ["a"]\n',
        encoding="utf-8",
    )
    asked = ("launch", "slurm", "tiny.toml", *BATCH, "--job", "site.toml", "--dry-run")
    text = forge(*asked, "--nodes", "2", "--env", "B=typed").out
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n" in text
    assert "#SBATCH --exclusive\n" in text
    assert "export A='from file'\nexport B=typed\n" in text
    for wrong, says in (
        ("[launch]\nnode = 2", "site.toml:2: launch.node: there is no such key. Did you mean 'nodes'?"),
        ('[launch]\nnodes = "2"', "site.toml:2: launch.nodes: expected an integer, found '2'."),
        ("[launch.slrum]\nx = 1", "site.toml:1: [launch.slrum]: there is no launcher 'slrum'. Did you mean 'slurm'?"),
        ("[train]\nsteps = 1", "site.toml:1: [train]: a job file has only the table [launch]"),
        (
            '[launch.slurm]\ncontainer = "docker"',
            "site.toml:2: launch.slurm.container: expected 'pyxis' or 'apptainer'",
        ),
    ):
        file.write_text(wrong, encoding="utf-8")
        assert says in forge(*asked, fails=2).err
    typed = forge(*asked[:-3], "--nodes", "0", fails=2).err
    assert "--nodes: launch.nodes: expected a number at least 1, found 0." in typed


def _bash(folder: Path, text: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    (folder / "job.sbatch").write_text(text, encoding="utf-8")
    command = ["bash", "job.sbatch"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
