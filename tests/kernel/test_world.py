"""What the environments of launchers mean, and what happens where they contradict themselves."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_train import CommunicationError, ConfigError, ForgeError
from forge_train.mesh.distributed import DistributedContext
from forge_train.mesh.layout import Layout
from forge_train.mesh.world import World
from forge_train_kit.failures import failure_of, in_words
from forge_train_kit.ranks import coordinates
from forge_train_tools.launching.launch import Ended, WorkerCommand, WorkerResult, check_alone
from forge_train_tools.launching.launched import kind
from forge_train_tools.launching.meeting import meet
from forge_train_tools.launching.world import first_host, here, translated
from forge_train_tools.messages import explain
from forge_train_tools.planning.topology import Topology

pytestmark = pytest.mark.unit
TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "2",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "5", "SLURM_NTASKS": "6", "SLURM_LOCALID": "1", "SLURM_NODEID": "2", "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "gpu[007-009]", "SLURM_TASKS_PER_NODE": "2(x3)",
}  # fmt: skip
MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip


def started(environment: Mapping[str, str]) -> World:
    """What forge reads where a launcher gave this environment."""
    return World.here({**environment, **translated(environment)})


def test_nobody_started_this_process() -> None:
    assert started({}) == World()


def test_torchrun() -> None:
    assert started(TORCHRUN) == World(3, 4, 1, 2, 2, "torchrun", "node0", 29500)
    assert started({**TORCHRUN, "FORGE_LAUNCHED": "17"}).launcher == "forge"
    assert started({**TORCHRUN, "TORCHELASTIC_MAX_RESTARTS": "3"}).max_restarts == 3


def test_slurm() -> None:
    world = started(SLURM)
    assert (world.rank, world.size, world.local_rank, world.local_size) == (5, 6, 1, 2)
    assert (world.launcher, world.address) == ("slurm", "gpu007")
    assert world.port == started({**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).port
    assert world.port != started({**SLURM, "SLURM_JOB_ID": "1235"}).port
    assert started({**SLURM, "MASTER_PORT": "777", "MASTER_ADDR": "other"}).address == "other"


def test_the_kernel_reads_what_slurm_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    with monkeypatch.context() as inside:
        inside.setattr("os.environ", os.environ.copy())
        assert here() == World.here() == here()
        assert World.here().launcher == "slurm"


def test_a_batch_script_of_slurm_is_one_process() -> None:
    batch = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}
    assert started({**batch, "SLURM_PROCID": "0"}) == World()


def test_torchrun_inside_slurm_is_torchrun() -> None:
    assert started({**SLURM, **TORCHRUN}).launcher == "torchrun"


def test_mpi() -> None:
    world = started(MPI)
    assert (world.rank, world.size, world.local_rank, world.address) == (1, 2, 1, "127.0.0.1")
    assert started({"PMI_RANK": "0", "PMI_SIZE": "1"}).size == 1
    assert started({**MPI, **SLURM}).launcher == "mpi"


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"RANK": "0"}, "has RANK=0 but no WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "has WORLD_SIZE=2 but no RANK"),
        ({**TORCHRUN, "RANK": "4"}, "RANK=4 and WORLD_SIZE=4: no such rank"),
        ({**TORCHRUN, "RANK": "one"}, "RANK='one'; expected an integer"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "local rank 2 of 2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "no MASTER_ADDR and no MASTER_PORT"),
        (
            {**SLURM, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "RANK=0 and WORLD_SIZE=2, but SLURM_PROCID=5 and SLURM_NTASKS=6",
        ),
        (
            {**MPI, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "RANK=0 and WORLD_SIZE=2, but OMPI_COMM_WORLD_RANK=1",
        ),
        ({**SLURM, "SLURM_PROCID": "6"}, "SLURM_PROCID=6 and SLURM_NTASKS=6: no such rank"),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "two"}, "SLURM_TASKS_PER_NODE='two'"),
        ({**MPI, "OMPI_COMM_WORLD_SIZE": "4"}, "no MASTER_ADDR"),
    ],
)
def test_contradictions_are_named(environment: Mapping[str, str], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        started(environment)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu003", "gpu003"), ("gpu[003-005,9],x", "gpu003"), ("a,b", "a"), ("r[1,3]n", "r1n"), ("", "")],
)
def test_the_first_of_slurms_nodes(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_several_can_not_be_started_inside_several(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"--nproc 2: this process was started by torchrun as rank 3 of 4 already"):
        check_alone("--nproc 2")


def test_which_axes_cross_nodes() -> None:
    axes = {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 4}
    assert Topology(16, 8).crossing(axes) == ("pp",)
    assert Topology(16, 4).crossing(axes) == ("pp", "dp_shard")
    assert Topology(16, 2).crossing(axes) == ("pp", "dp_shard", "tp")
    assert Topology(16).crossing(axes) == ()
    assert Topology(16, 8).nodes == 2
    assert Topology(12, 6).crossing({"dp_shard": 3, "tp": 4}) == ("dp_shard", "tp"), "a group that straddles"


def test_a_port_that_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        _environment(monkeypatch, taken.getsockname()[1])
        with (
            pytest.raises(ForgeError, match=r"the port is in use\. Set MASTER_PORT"),
            DistributedContext.join(Layout(dp_shard=2), "cpu", timeout=1, meet=meet),
        ):
            pass


def test_ranks_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    _environment(monkeypatch, port)
    with (
        pytest.raises(ForgeError, match=r"After 5 s rank 1 has not joined the other 1 of 2 processes"),
        DistributedContext.join(Layout(dp_shard=2), "cpu", timeout=5, meet=meet),
    ):
        pass


def _environment(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    values = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**values, "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)


def test_what_is_said_of_several_failures() -> None:
    own = WorkerResult(2, 1, "own", "ValueError: no\n  at x.py:1, in f")
    lost = [WorkerResult(rank, 1, "lost", "Connection closed by peer") for rank in (0, 1)]
    assert (
        Ended([own, *lost]).complaint() == "Rank 2: ValueError: no\n  at x.py:1, in f\nRanks 0, 1 ended because of it."
    )
    mistake = [WorkerResult(rank, 2, "own", "no such plugin") for rank in (0, 1)]
    assert Ended(mistake).complaint() == "no such plugin"
    assert Ended(mistake).code == 2
    assert Ended([*mistake, WorkerResult(2, 1, "lost", "Connection closed by peer")]).complaint() == "no such plugin"
    killed = WorkerResult(1, 1, "killed", "was killed by SIGKILL.")
    assert Ended([killed, lost[0]]).complaint() == "Rank 1 was killed by SIGKILL.\nRank 0 ended because of it."
    full = [WorkerResult(rank, 1, "own", f"no space: {rank + 3}.5 KiB left\nMake room.") for rank in (2, 0)]
    other = WorkerResult(3, 1, "own", "no such file")
    assert Ended([*full, other, lost[1]]).complaint() == (
        "Ranks 0, 2: no space: 5.5 KiB left\nMake room.\nRank 3 failed too: no such file\nRank 1 ended because of it."
    )
    assert Ended([WorkerResult(0, 75), WorkerResult(1, 75)]).complaint() == ""
    assert Ended([WorkerResult(0, 75)]).code == 75


def test_ranks_are_named_by_where_they_lie_in_the_mesh() -> None:
    layout = Layout(pp=2, dp_shard=2, tp=2)
    assert [coordinates(layout, rank) for rank in (0, 3, 6)] == [
        {"pp": 0, "dp_shard": 0, "tp": 0}, {"pp": 0, "dp_shard": 1, "tp": 1}, {"pp": 1, "dp_shard": 1, "tp": 0},
    ]  # fmt: skip
    assert coordinates(Layout(pp=3), 2) == {"pp": 2}
    assert coordinates(Layout(dp_shard=3), 2) == {}, "the rank's number says as much"
    smaller = {4: Layout(pp=2, tp=2)}
    command = WorkerCommand("module:name", {}, Path(), Path(), layout=layout, smaller=smaller)
    killed = WorkerResult(6, 1, "killed", "was killed by SIGKILL.")
    lost = [WorkerResult(rank, 1, "lost", "Connection closed by peer") for rank in (5, 7)]
    ended = Ended(command.placed([killed, *lost], 8))
    assert ended.complaint() == (
        "Rank 6 (stage 1, dp_shard 1, tp 0) was killed by SIGKILL.\nRanks 5, 7 (stage 1, tp 1) ended because of it."
    )
    assert ended.first.as_failure().message == "Rank 6 (stage 1, dp_shard 1, tp 0) was killed by SIGKILL."
    (third,) = command.placed([WorkerResult(3, 1, "killed", "was killed by SIGKILL.")], 4)
    assert third.who == "Rank 3 (stage 1, tp 1)", "an attempt with fewer processes has a layout of its own"


def test_errors_that_only_follow_from_another_rank() -> None:
    assert kind(RuntimeError("[pair.cc:537] Read error [1.2.3.4]: Connection reset by peer")) == "lost"
    assert kind(RuntimeError("Timed out waiting 5000ms for recv operation to complete")) == "timeout"
    assert kind(RuntimeError("shape mismatch")) == "own"
    assert kind(ConfigError("a timeout that is too short")) == "own"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            "[/pytorch/gloo/unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete",
            (
                "Another rank does not answer, in all_reduce: it hangs, or its machine or the network is gone "
                "(Timed out waiting 6000ms for recv operation to complete)."
            ),
        ),
        (
            "[/x/pair.cc:537] Read error [10.0.0.1]:4: Connection reset by peer. This is typically caused by a remote",
            (
                "The connection to another rank is lost, in all_reduce: it has ended, or its machine has "
                "(Read error [10.0.0.1]:4: Connection reset by peer)."
            ),
        ),
        ("a tensor of 3 elements", "RuntimeError: a tensor of 3 elements"),
    ],
)
def test_errors_of_collectives_in_words(said: str, words: str) -> None:
    """Where torch raised them; the same text from elsewhere is left as it is."""
    code = compile("def all_reduce(text): raise RuntimeError(text)", "/site-packages/torch/distributed/c10d.py", "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    with pytest.raises(RuntimeError) as torchs:
        names["all_reduce"](said)
    assert in_words(torchs.value) == failure_of(torchs.value).message == words
    assert explain(torchs.value).splitlines()[0] == words
    assert in_words(RuntimeError("Timed out waiting")) == "RuntimeError: Timed out waiting"


def test_nobody_listens(capfd: pytest.CaptureFixture[str]) -> None:
    """One sentence; torch's store, which writes its C++ frames, is not asked."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = World(rank=1, size=2, address="127.0.0.1", port=port)
    with pytest.raises(CommunicationError) as said:
        meet(place, torch.device("cpu"), timedelta(seconds=0.1))
    assert str(said.value) == (
        f"Rank 1 on {socket.gethostname()} can't reach 127.0.0.1:{port} within 0.1 s: Connection refused. "
        "Look whether rank 0 was started there, and at the network between both."
    )
    assert capfd.readouterr().err == ""
