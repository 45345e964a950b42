"""`forge train --nproc N` from outside: what it trains, and how it ends when something goes wrong."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import forge_cli
import toys
import warm
from forge_train.checkpoint.checkpoint import check, found
from forge_train.run import records

pytestmark = [pytest.mark.dist, pytest.mark.e2e]
TESTS = Path(__file__).parent.parent
STEPS = 6
FORGE = (sys.executable, "-P", "-m", "forge_train_cli")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
PATH = os.pathsep.join([str(TESTS), str(TESTS / "dist")])


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": PATH, **more}


def config(folder: Path, *plugins: str, **values: Any) -> str:
    values = {"train.steps": STEPS, "checkpoint.every": 2, **values}
    file = toys.write_config(folder, "layouts:Replicas", *(f"layouts:{name}" for name in plugins), **values)
    return str(file)


def preloaded(folder: Path, *arguments: str) -> forge_cli.Ended:
    """`forge train` from a process that has torch already; `start` begins one that has not."""
    command = ("train", *arguments, "--without", "fsdp2")
    return forge_cli.forge_process(*command, preloaded=True, cwd=folder, env=environment())


def here(folder: Path, *arguments: str, **more: str) -> forge_cli.Ended:
    """`forge train`, launched by this process: its ranks have processes of their own."""
    with contextlib.chdir(folder):
        return forge_cli.forge("train", *arguments, "--without", "fsdp2", environment=environment(**more))


def start(folder: Path, *arguments: str, command: tuple[str, ...] = FORGE, **more: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    popen = subprocess.Popen if "--nproc" in arguments else warm.Popen
    return popen(
        [*command, "train", *arguments, "--without", "fsdp2"],
        cwd=folder, env=environment(**more), stdout=pipe, stderr=pipe, text=True,
    )  # fmt: skip


def numbers(run: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in line.items() if key not in records.TIMINGS}
        for line in records.read(run / "metrics.jsonl")
    ]


def wait_for(run: Path, step: int) -> None:
    for _ in range(12000):
        if any(line["step"] >= step for line in records.read(run / "metrics.jsonl")):
            return
        time.sleep(0.05)
    raise AssertionError(f"{run}: never came to step {step}")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[forge_cli.Ended, Path]:
    """An undisturbed run on two processes: how the command ended, and the run's folder."""
    folder = tmp_path_factory.mktemp("two")
    return preloaded(folder, config(folder), "--nproc", "2", "--name", "two"), folder / "runs" / "two"


def test_two_processes_train_as_one_does(two: tuple[forge_cli.Ended, Path], tmp_path: Path) -> None:
    done, run = two
    assert done.code == 0, done.err
    alone = toys.run(tmp_path, steps=STEPS, config={"checkpoint.every": 2})
    for ours, theirs in zip(numbers(run), alone.numbers, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    assert done.out.count(f"step {STEPS}/{STEPS} · loss") == 1, "rank 0 alone is on the screen"
    assert "forge runs show" in done.out
    assert (run / "log" / "rank-1.log").exists()
    assert json.loads((run / "outcome.json").read_text())["outcome"] == "done"
    assert json.loads((run / "environment.json").read_text())["launcher"] == "forge"


def test_a_killed_rank_is_survived(two: tuple[forge_cli.Ended, Path], tmp_path: Path) -> None:
    file = config(tmp_path, "Trouble", **{"trouble.what": "kill", "trouble.at": 5})
    done = preloaded(tmp_path, file, "--nproc", "2", "--max-restarts", "1", "--name", "killed")
    assert done.code == 0, done.err
    assert "Rank 1 was killed by SIGKILL" in done.err
    assert "start again (attempt 1 of 1)" in done.err
    run = tmp_path / "runs" / "killed"
    assert numbers(run) == numbers(two[1]), "the rest repeats exactly"
    events = list(records.read(run / "events.jsonl"))
    (lost,) = [event for event in events if event["event"] == "run_finished" and event["outcome"] == "failed"]
    assert (lost["error"]["rank"], lost["error"]["type"]) == (1, "internal")
    assert lost["reason"].startswith("Rank 1 was killed by SIGKILL")
    (resumed,) = [event for event in events if event["event"] == "resumed"]
    assert resumed["step"] == 4
    assert resumed["time"] - lost["time"] < 60, "≤ 15 s on a machine that does nothing else"


@pytest.mark.parametrize(
    ("what", "name", "thread"),
    [("crash", "SIGSEGV", ""), ("crash in C", "SIGABRT", ", in a thread that runs no Python")],
)
def test_a_crash_is_named_with_its_stack(tmp_path: Path, what: str, name: str, thread: str) -> None:
    file = config(tmp_path, "Trouble", **{"trouble.what": what})
    done = here(tmp_path, file, "--nproc", "2", "--name", "crashed")
    assert done.code == 1
    said = rf"Rank 1 was killed by {name} after step [23]{thread}; the stacks of its threads are in its log\.\n"
    assert re.search(said + r" +at \S+layouts.py:\d+, in on_gradients\n", done.err), done.err
    log = tmp_path / "runs" / "crashed" / "log" / "rank-1.log"
    assert "Fatal Python error: " in log.read_text()
    assert str(log.relative_to(tmp_path)) in done.err
    settings = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert any(re.search(pattern, done.err) for pattern in settings["only_rerun"]) == bool(thread), "gloo's alone"


def test_the_first_that_failed_is_named(tmp_path: Path) -> None:
    file = config(tmp_path, "Trouble", **{"trouble.what": "raise"})
    done = here(tmp_path, file, "--nproc", "2", "--json", "--name", "raised")
    assert done.code == 1
    assert "Rank 1: ValueError: something of this rank's own" in done.err
    assert "in plugin 'trouble'" in done.err
    assert done.err.count("Traceback") == 0
    assert "Rank 0 ended because of it" in done.err
    log = tmp_path / "runs" / "raised" / "log" / "rank-1.log"
    assert log.read_text().count("ValueError: something") == 1
    result = json.loads(done.out)
    error = {
        "type": "plugin", "message": "ValueError: something of this rank's own", "rank": 1, "phase": "step",
        "plugin": "trouble", "hook": "on_gradients", "key": "",
    }  # fmt: skip
    assert result == {
        "run": "runs/raised", "step": 3, "loss": pytest.approx(3.5, abs=0.5), "outcome": "failed", "error": error,
    }  # fmt: skip
    assert json.loads((log.parent.parent / "outcome.json").read_text())["error"] == error
    ended = [one for one in records.read(log.parent.parent / "events.jsonl") if one["event"] == "run_finished"]
    assert [one["error"] for one in ended] == [error], "and not what rank 0 saw of it"


def test_a_rank_that_hangs_is_named_with_its_stack(tmp_path: Path) -> None:
    file = config(tmp_path, "Trouble", **{"trouble.what": "hang", "run.timeout": 10.0})
    done = here(tmp_path, file, "--nproc", "2", "--name", "hung")
    assert done.code == 1
    assert re.search(r"Rank 1 hangs after step [23]; the others waited for it in all_reduce\.", done.err)
    assert "layouts.py" in done.err
    assert "in on_gradients" in done.err
    assert "forge train --resume runs/hung" in done.err


def test_a_mistake_ends_it_once_for_all(tmp_path: Path) -> None:
    """Found while composing, on every rank: exit code 2, no other attempt, nothing left."""
    file = config(tmp_path, "Columns", **{"columns.plan": ["gate"]})
    done = here(tmp_path, file, "--nproc", "2", "--max-restarts", "2", "--name", "wrong")
    assert (done.code, done.out) == (2, "")
    assert done.err == "Error: Plugin 'columns': the plan's entry 'gate' matches nothing.\n"
    assert not (tmp_path / "runs" / "wrong").exists()


def test_mistakes_that_need_no_process(tmp_path: Path) -> None:
    done = here(tmp_path, config(tmp_path), "--nproc", "3")
    assert done.code == 2
    assert "micro_batch × data-parallel ranks = 2 × 3 = 6" in done.err
    assert not (tmp_path / "runs").exists()
    world = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    done = here(tmp_path, config(tmp_path), "--nproc", "2", **world)
    assert done.code == 2
    assert "--nproc 2: this process was started by torchrun as rank 0 of 2 already" in done.err


def test_signals_and_orphans(tmp_path: Path) -> None:
    """Ctrl-C saves and ends with 75; the same command goes on; SIGKILL of the launcher leaves no process, and a lock
    that the next command takes over, on one process this time."""
    file = config(tmp_path, "Slow", **{"train.steps": 400, "slow.seconds": 0.05, "checkpoint.every": 0})
    arguments = (file, "--nproc", "2", "--name", "stopped")
    run = tmp_path / "runs" / "stopped"
    first = forge_cli.start("train", *arguments, "--without", "fsdp2", preloaded=True, cwd=tmp_path, env=environment())
    wait_for(run, 3)
    first.send_signal(signal.SIGINT)
    out, err = first.communicate(timeout=600)
    assert first.returncode == 75, err
    assert "Go on with:" in out
    (saved,) = found(run / "checkpoints")
    assert not check(saved.path, contents=True)
    before = len(numbers(run))
    second = start(tmp_path, *arguments)
    wait_for(run, before + 3)
    workers = _children(second.pid)
    assert len(workers) == 2
    second.kill()
    second.wait()
    for _ in range(6000):
        if not any(map(_alive, workers)):
            break
        time.sleep(0.1)
    assert not any(map(_alive, workers))
    assert list(run.glob(".lock.*")), "it could not let go"
    last = here(tmp_path, file, "--name", "stopped", "-s", f"train.steps={len(numbers(run)) + 2}")
    assert last.code == 0, last.err
    assert f"took the lock over from process {second.pid} on" in last.err
    assert not list(run.glob(".lock.*"))
    assert [line["step"] for line in numbers(run)][: before + 3] == list(range(1, before + 4))


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    file = config(tmp_path, "Trouble", **{"trouble.what": "hang", "trouble.at": 2})
    command = ("train", file, "--nproc", "2", "--name", "now", "--quiet", "--without", "fsdp2")
    process = forge_cli.start(*command, preloaded=True, cwd=tmp_path, env=environment())
    while not (tmp_path / "hangs").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    log = tmp_path / "runs" / "now" / "log" / "rank-1.log"  # rank 0 waits for it in C++, and hears no signal
    while "a second signal ends at once" not in log.read_text(encoding="utf-8"):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 128 + signal.SIGTERM
    assert "Ended by SIGTERM before it could save." in err


def test_two_agents(tmp_path: Path) -> None:
    """torchrun with two nodes on this machine and one shared run folder."""
    file = config(tmp_path)
    codes, _, errors = _agents(tmp_path, [file, file], "shared")
    assert codes == [0, 0], errors
    run = tmp_path / "runs" / "shared"
    assert [line["step"] for line in numbers(run)] == list(range(1, STEPS + 1))
    assert json.loads((run / "environment.json").read_text())["launcher"] == "torchrun"


def test_nodes_with_different_plugins(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    files = config(tmp_path), config(tmp_path / "other", "Slow", **{"slow.seconds": 0.0})
    port = _free_port()
    tasks = [start(tmp_path, file, "--name", "differing", **_task(rank, port)) for rank, file in enumerate(files)]
    errors = [task.communicate(timeout=600)[1] for task in tasks]
    assert [task.returncode for task in tasks] == [2, 2], errors
    assert all("The processes do not agree" in error for error in errors)
    assert all("plugin slow: None on rank 0" in error for error in errors)
    assert not (tmp_path / "runs" / "differing").exists()


def test_slurm_starts_it(tmp_path: Path) -> None:
    file, port = config(tmp_path), _free_port()
    tasks = [start(tmp_path, file, "--name", "slurm", **_task(rank, port)) for rank in range(2)]
    ends = [task.communicate(timeout=600) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], ends
    run = tmp_path / "runs" / "slurm"
    assert len(numbers(run)) == STEPS
    assert json.loads((run / "environment.json").read_text())["launcher"] == "slurm"
    assert "step" not in ends[1][0], "rank 0 alone is on the screen"


def test_nodes_without_a_shared_file_system(tmp_path: Path) -> None:
    """Each node has a folder of its own; the second one even has a run of that name, from another day."""
    file, port = config(tmp_path), _free_port()
    nodes = [tmp_path / f"node{rank}" for rank in range(2)]
    (nodes[1] / "runs" / "far").mkdir(parents=True)
    (nodes[1] / "runs" / "far" / ".lock.1").write_text("another day")
    nodes[0].mkdir()
    tasks = [start(node, file, "--name", "far", **_task(rank, port)) for rank, node in enumerate(nodes)]
    ends = [task.communicate(timeout=300) for task in tasks]
    assert [task.returncode for task in tasks] == [2, 2], ends
    for _, err in ends:
        assert re.fullmatch(
            r"Error: runs/far: rank 1 on \S+ does not see what rank 0 on \S+ has there \(1 of 2 ranks do not\)\..+\n",
            err,
        )
    assert not (nodes[0] / "runs" / "far").exists()


def _task(rank: int, port: int) -> Mapping[str, str]:
    return {
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NTASKS": "2", "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "localhost", "SLURM_TASKS_PER_NODE": "2", "MASTER_PORT": str(port),
    }  # fmt: skip


def _agents(folder: Path, files: list[str], name: str) -> tuple[list[int], list[str], list[str]]:
    """Run one torchrun with a process of its own for each configuration."""
    port = _free_port()
    agents = []
    for node, file in enumerate(files):
        rendezvous = ("--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1")
        where = ("--master-addr", "127.0.0.1", "--master-port", str(port), "-m", "forge_train_cli")
        command = (*TORCHRUN, *rendezvous, *where)
        agents.append(start(folder, file, "--name", name, "--quiet", command=command))
    ends = [agent.communicate(timeout=600) for agent in agents]
    return [agent.returncode for agent in agents], [out for out, _ in ends], [err for _, err in ends]


def _free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _children(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in children.read_text().split()]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False
