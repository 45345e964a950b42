"""`forge launch slurm`: what the script says, and when it queues its job again. Slurm is stand-ins on the PATH."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

import pytest

from forge_command import Forge
from forge_train import ConfigError
from forge_train_tools.launching import slurm

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
        "--sbatch",
        "partition=gpu",
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
    assert said == "Wrote tiny.sbatch.\nSubmit it with: sbatch tiny.sbatch\n"
    text = (folder / "tiny.sbatch").read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if line.startswith("#SBATCH")] == [
        '#SBATCH --job-name="two words"',
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --time=1:00:00",
        "#SBATCH --signal=USR1@300",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --output=%x-%j.log",
        "#SBATCH --partition=gpu",
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
        (("--time", "soon"), "--time 'soon': expected Slurm's minutes, [days-]hours:minutes:seconds or days-hours."),
        (("--sbatch", "partition gpu"), "--sbatch partition gpu='': expected an option of sbatch, like partition=gpu."),
        (("--sbatch", "nodes=3"), "--sbatch nodes: say it with --nodes."),
        (("--sbatch", "partition="), "partition=: a value is missing."),
        (("--sbatch", "J=other"), "--sbatch J: expected the long name of the option, like partition=gpu."),
        (("--sbatch", "signal=TERM@60"), "--sbatch signal: the script relies on its own --signal=USR1@300."),
        (("--sbatch", "no-requeue"), "--sbatch no-requeue: the script relies on its own --requeue."),
        (("--time", "00:02:00"), "--time 00:02:00: is 120 s. Jobs are told to stop 300 s before the limit"),
        (("-s", "parallel.tp=3"), "= 3, but there are 2 processes."),
        (("-s", "train.global_batch=3"), "train.global_batch: 3 is not a multiple of"),
        (("--output", "tiny.toml"), "tiny.toml exists and is not a script written by forge"),
        (("--submit",), "There is no sbatch here. Submit it where Slurm is: sbatch tiny.sbatch"),
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
        slurm.SlurmJob("a", 1, 1, time, tmp_path, ("true",))


def test_submitting(forge: Forge, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = stand_in(folder / "bin", sbatch='echo "$*" > asked; echo "42;cluster"')
    monkeypatch.setenv("PATH", env["PATH"])
    said = forge("launch", "slurm", "tiny.toml", *ASKED, *BATCH, "-o", "job.sh", "--submit").out
    assert said == "Wrote job.sh.\nSubmitted as job 42.\n"
    assert (folder / "asked").read_text(encoding="utf-8") == "--parsable job.sh\n"
    stand_in(folder / "bin", sbatch='echo "sbatch: error: invalid partition specified: x" >&2; exit 1')
    refused = forge("launch", "slurm", "tiny.toml", *ASKED, *BATCH, "--submit", fails=1).err
    assert "sbatch refuses tiny.sbatch: sbatch: error: invalid partition specified: x" in refused


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
    job = slurm.SlurmJob("a", 1, 2, "60", tmp_path, ("forge", "train", "a b"), options={"mem": "0"})
    done = _bash(tmp_path, job, env)
    assert (done.returncode, done.stderr) == (code, "")
    assert (tmp_path / "tasks").read_text(encoding="utf-8") == "--kill-on-bad-exit=0 --wait=300 forge train a b\n"
    assert (tmp_path / "asked").exists() is again
    if again:
        assert (tmp_path / "asked").read_text(encoding="utf-8") == "requeue 42\n"


def test_the_script_outlives_the_signals_of_its_tasks(tmp_path: Path) -> None:
    """Where Slurm sends them to the whole job, the script waits for the tasks to save."""
    srun = 'kill -TERM $PPID; kill -USR1 $PPID; sleep 0.2; echo "$SRUN_CPUS_PER_TASK $OMP_NUM_THREADS" > tasks; exit 75'
    env = stand_in(tmp_path / "bin", srun=srun, squeue="exit 1", scontrol='echo "$*" > asked')
    env = {name: value for name, value in env.items() if name != "OMP_NUM_THREADS"}
    done = _bash(tmp_path, slurm.SlurmJob("a", 1, 2, "60", tmp_path, ("true",)), {**env, "SLURM_CPUS_PER_TASK": "6"})
    assert done.returncode == 75
    assert (tmp_path / "asked").read_text(encoding="utf-8") == "requeue 42\n"
    assert (tmp_path / "tasks").read_text(encoding="utf-8") == "6 6\n"


def _bash(folder: Path, job: slurm.SlurmJob, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    (folder / "job.sbatch").write_text(job.script(), encoding="utf-8")
    command = ["bash", "job.sbatch"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
