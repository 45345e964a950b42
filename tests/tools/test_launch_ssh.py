"""`forge launch ssh`: nodes that a stand-in for ssh starts here, whose ranks are small scripts instead of training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forge_train import ConfigError
from forge_train_tools.launchers.job import ClusterJob, Machines
from forge_train_tools.launchers.ssh import SSH, SSHOptions

pytestmark = [pytest.mark.e2e]
SSH_HERE = """#!/bin/bash
while [ "$1" != -- ]; do shift; done
echo "$2" >> hosts
exec bash -c "$3"
"""
"""Runs what it is to run elsewhere, by the shell, as sshd does."""


def job(folder: Path, *arguments: str, **machines: Any) -> ClusterJob:
    asked = Machines(**{"python": sys.executable, **machines})
    return ClusterJob("mine", asked, arguments, folder, folder / "runs", gpus=False)


def start(folder: Path, rank: str, *arguments: str, hosts: tuple[str, ...] = ("a", "b"), **machines: Any) -> Any:
    """The processes of all nodes, each of which is this script; the line READY says that all can be asked to stop."""
    (folder / "ranks").mkdir()
    (folder / "ranks" / "forge_train_cli.py").write_text(rank, encoding="utf-8")
    (folder / "bin").mkdir()
    (folder / "bin" / "ssh").write_text(SSH_HERE, encoding="utf-8")
    (folder / "bin" / "ssh").chmod(0o755)
    launcher, asked = SSH(SSHOptions(hosts=hosts)), job(folder, *arguments, **machines)
    ((name, text),) = launcher.files(asked).items()
    (folder / name).write_text(text, encoding="utf-8")
    own = {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(folder / "ranks")}
    return subprocess.Popen(
        launcher.submit(asked, folder / name), cwd=folder, env={**os.environ, **own}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


TELL = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "FORGE_LAUNCHER", "OWN")
with open("told-" + os.environ["RANK"], "a") as out:
    out.write(json.dumps([sys.argv[1:], {name: os.environ.get(name) for name in names}]) + "\\n")
"""


def told(folder: Path, rank: int) -> list[Any]:
    return [json.loads(line) for line in (folder / f"told-{rank}").read_text(encoding="utf-8").splitlines()]


def test_ranks_of_two_nodes(tmp_path: Path) -> None:
    """Every rank gets its place, and arguments and variables as they were typed; nothing that was typed runs."""
    folder = tmp_path / "a $(touch bad) ' `touch bad`"
    folder.mkdir()
    hostile = ("$(touch bad)", "a\nb'; touch bad", '"`touch bad`"')
    started = start(folder, TELL, "train", *hostile, nproc=2, env={"OWN": "".join(hostile)})
    out, err = started.communicate(timeout=60)
    assert (started.returncode, out, err) == (0, "", ""), err
    for rank in range(4):
        ((arguments, names),) = told(folder, rank)
        assert arguments == ["train", *hostile]
        assert names == {
            "RANK": str(rank), "LOCAL_RANK": str(rank % 2), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "a", "FORGE_LAUNCHER": "forge launch", "OWN": "".join(hostile),
        }  # fmt: skip
    assert sorted((folder / "hosts").read_text().split()) == ["a", "b"]
    assert not [*tmp_path.rglob("bad")]


ONCE = TELL + "os.environ['RANK'] == '1' and len(open('told-1').readlines()) == 1 and os.kill(os.getpid(), 9)\n"


def test_a_killed_rank_starts_its_node_again(tmp_path: Path) -> None:
    started = start(tmp_path, ONCE, "train", max_restarts=1)
    _, err = started.communicate(timeout=60)
    assert started.returncode == 0
    assert err == "Rank 1 was killed by SIGKILL.\nThe ranks of this node start again (attempt 1 of 1).\n"
    assert (len(told(tmp_path, 0)), len(told(tmp_path, 1))) == (1, 2)


def test_a_killed_rank_without_another_attempt(tmp_path: Path) -> None:
    started = start(tmp_path, ONCE, "train")
    _, err = started.communicate(timeout=60)
    assert started.returncode == 1
    assert err == "Rank 1 was killed by SIGKILL.\nb: ended with exit code 1.\n"


@pytest.mark.parametrize(("codes", "code"), [((0, 75), 75), ((2, 2), 2), ((75, 75), 75), ((3, 3), 3)])
def test_exit_codes(tmp_path: Path, codes: tuple[int, int], code: int) -> None:
    """A mistake, and an end after saving, are not tried again."""
    rank = TELL + f"sys.exit({codes}[int(os.environ['RANK'])])\n"
    started = start(tmp_path, rank, "train", max_restarts=2)
    started.communicate(timeout=60)
    assert started.returncode == code
    assert len(told(tmp_path, 0)) == 1


WAIT = """
import os, signal, sys
def save(number, frame):
    open(f"saved-{os.environ['RANK']}", "w").write(signal.Signals(number).name)
    sys.exit(75)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, save)
os.write(1, b"READY\\n")  # whole: two ranks write to one pipe
while True:
    signal.pause()
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_signal_has_all_ranks_save(tmp_path: Path, name: str) -> None:
    started = start(tmp_path, WAIT, "train")
    assert [started.stdout.readline() for _ in range(2)] == ["READY\n"] * 2
    started.send_signal(signal.Signals[name])
    started.communicate(timeout=60)
    assert started.returncode == 75
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in range(2)] == [name] * 2


def test_ranks_save_when_the_connection_is_lost(tmp_path: Path) -> None:
    """The nodes outlive the process that started them, as far as it takes to save."""
    started = start(tmp_path, WAIT, "train")
    assert [started.stdout.readline() for _ in range(2)] == ["READY\n"] * 2
    started.kill()
    started.wait()
    started.stdout.read()  # its end: no rank has it open any more
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in range(2)] == ["SIGTERM"] * 2


def test_a_second_signal_ends_ranks_that_do_not_save(tmp_path: Path) -> None:
    stubborn = WAIT.replace("    sys.exit(75)\n", "    os.write(1, b'ASKED\\n')\n")
    started = start(tmp_path, stubborn, "train")
    assert [started.stdout.readline() for _ in range(2)] == ["READY\n"] * 2
    started.terminate()
    assert [started.stdout.readline() for _ in range(2)] == ["ASKED\n"] * 2
    started.terminate()
    started.communicate(timeout=60)
    assert started.returncode == 128 + signal.SIGTERM


def test_a_host_that_is_not_there(tmp_path: Path) -> None:
    """Its name is told, and the others are ended."""
    started = start(tmp_path, TELL, "train")
    started.communicate(timeout=60)
    (tmp_path / "bin" / "ssh").write_text("#!/bin/bash\necho 'no route' >&2\nexit 255\n", encoding="utf-8")
    own = {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    command = [sys.executable, "-m", "forge_train_tools.launchers.ssh", "mine.ssh"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **own}, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ssh could not connect, or lost the connection.\n" in done.stderr


@pytest.mark.parametrize(
    ("hosts", "machines", "says"),
    [
        ((), {}, "name the hosts after CONFIG"),
        (("-oProxyCommand=x",), {}, "'-oProxyCommand=x' is no host"),
        (("a b",), {}, "'a b' is no host: expected a name or an address, as in user@node-1."),
        (("$(touch bad)",), {}, "is no host"),
        (("a", "a"), {}, "a is named twice"),
        (("a", "b"), {"nodes": 3}, "--nodes 3: 2 hosts are named; leave --nodes out."),
        (("a",), {"queue": "gpu"}, "--queue: has no effect with ssh"),
    ],
)
def test_what_is_refused(tmp_path: Path, hosts: tuple[str, ...], machines: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        SSH(SSHOptions(hosts=hosts)).files(job(tmp_path, "train", **machines))
    assert says in str(refused.value)
