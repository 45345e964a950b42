"""The pool of ranks that distributed tests share."""

from __future__ import annotations

import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pool_cases
from forge_train import ForgeError
from forge_train_tools.testing import Pool, PoolError, Verifier, hanging, pool

pytestmark = pytest.mark.dist


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ranks_meet_in_a_world_of_any_size(ranks: Pool, world: int) -> None:
    assert ranks.run(pool_cases.total, world, value=2.0) == [world * (world + 1)] * world


@pytest.mark.slow
def test_worlds_of_all_sizes_share_the_same_processes(ranks: Pool) -> None:
    four, two = (ranks.run("pool_cases:gather", world) for world in (4, 2))
    assert [reply["process"] for reply in two] == [reply["process"] for reply in four[:2]]
    assert [reply["ranks"] for reply in two] == [[0, 1], [0, 1]]
    assert four[3]["world"] == "4"


@pytest.mark.slow
def test_a_failure_comes_with_its_rank_and_traceback(ranks: Pool) -> None:
    before = ranks.run(pool_cases.gather, 3)
    with pytest.raises(PoolError, match="rank 1 failed") as error:
        ranks.run(pool_cases.fail_on, 3, rank=1)
    assert "ValueError: rank 1 can't go on" in str(error.value)
    assert "pool_cases.py" in str(error.value)
    assert "did not end" not in str(error.value)
    after = ranks.run(pool_cases.gather, 3)
    assert [reply["process"] for reply in after] == [reply["process"] for reply in before]


@pytest.mark.slow
def test_cases_that_keep_their_group_share_its_meshes(ranks: Pool) -> None:
    ranks.run(pool_cases.meets_again, 3, keep=True)
    assert ranks.run(pool_cases.meets_again, 3, keep=True) == [True] * 3
    assert ranks.run(pool_cases.meets_again, 2, keep=True) == [False] * 2, "another world"
    assert ranks.run(pool_cases.meets_again, 2) == [False] * 2, "one that does not keep has its own"
    assert ranks.run(pool_cases.meets_again, 2, keep=True) == [False] * 2
    with pytest.raises(PoolError, match="rank 1 failed"):
        ranks.run(pool_cases.fail_on, 2, keep=True, rank=1)
    assert ranks.run(pool_cases.meets_again, 2, keep=True) == [False] * 2, "a failure ends it"


@pytest.mark.slow
def test_a_hang_is_ended_and_shows_where(ranks: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time runs out once the other rank has answered, however long that takes on a busy machine."""
    before = ranks.run(pool_cases.gather, 2)
    now, real = [0.0], pool._Worker.reply

    def reply(worker: pool._Worker) -> dict[str, Any]:
        now[0] = 6000.0
        return real(worker)

    monkeypatch.setattr(pool._Worker, "reply", reply)
    monkeypatch.setattr(hanging, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(hanging, "stacks", lambda process: f"stacks of {process}")
    with pytest.raises(PoolError, match=r"rank 1 hung for 600 s") as error:
        ranks.run(pool_cases.hang_on, 2, rank=1)
    assert "in hang_on" in str(error.value)
    assert f"stacks of {before[1]['process']}" in str(error.value)
    assert "rank 0" not in str(error.value)
    after = ranks.run(pool_cases.gather, 2)
    assert not {reply["process"] for reply in after} & {reply["process"] for reply in before}


def test_a_rank_that_fails_by_itself_is_not_waited_for_by_the_hour(
    ranks: Pool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`forge verify` on a pool: what one rank says is told, though others hang for its messages."""
    monkeypatch.setattr(pool, "GRACE", 1.0)
    monkeypatch.setattr(hanging, "stacks", lambda process: "")
    run = ranks.run
    monkeypatch.setattr(ranks, "run", lambda case, world, **more: run(pool_cases.leave_on, world, keep=True, rank=1))
    with pytest.raises(ForgeError, match="ValueError: broken"):
        Verifier(ranks)._start(2, {"folder": str(tmp_path)})


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the system does not say how long a process waits for a core")
def test_waiting_for_a_core_does_not_count_as_hanging(ranks: Pool) -> None:
    """A rank that shares a core with seven others takes eight times as long, and hangs no more than alone."""
    (took,) = ranks.run(pool_cases.compute_crowded, 1, timeout=2.0, seconds=0.5, others=7)
    assert took > 2.0, "it was not crowded"


BACKTRACES = """\
[New LWP 7]
Thread 3 (Thread 0x7f09 (LWP 9) "pt_gloo_runloop"):
#0  wait (private=0) at ./futex.c:57
#1  0x00007f0e35512501 in c10d::ProcessGroupGloo::runLoop(int) () from lib/libtorch_cpu.so
Thread 2 (Thread 0x7f08 (LWP 8) "pt_gloo_runloop"):
#0  wait (private=1) at ./futex.c:57
#1  0x00007f0e35512501 in c10d::ProcessGroupGloo::runLoop(int) () from lib/libtorch_cpu.so

Thread 1 (Thread 0x7f07 (LWP 7) "python"):
#0  0x00007f0e45ca3f7b in read () from libc.so.6
"""


def test_threads_of_one_stack_are_shown_once() -> None:
    assert hanging.merged(BACKTRACES).splitlines() == [
        "2 × pt_gloo_runloop",
        "    wait",
        "    c10d::ProcessGroupGloo::runLoop(int)",
        "1 × python",
        "    read",
    ]


def test_the_debugger_is_asked_for_the_stacks_of_a_process() -> None:
    """Of a small one: for a rank it reads all of torch's symbols."""
    command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as small:
        assert small.stdout
        small.stdout.readline()
        told = hanging.stacks(small.pid)
    installed = shutil.which("gdb") is not None
    shown = r"1 × python\S*\n    \w|gdb: .*ptrace" if installed else "Its stacks in C.. would be here if gdb were"
    assert re.match(shown, told, re.DOTALL), told


class OutOfTime(BaseException):
    """What a test's own time limit raises, whatever the test is at."""


def test_a_time_limit_from_outside_shows_every_rank_and_its_collectives_and_ends_them(
    ranks: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = [int(str(reply["process"])) for reply in ranks.run(pool_cases.gather, 2)]
    outputs = [worker.output for worker in ranks._workers[:2]]
    written = [output.stat().st_size for output in outputs]

    def select(selector: object, timeout: float) -> None:
        deadline = time.monotonic() + 600
        while any(output.stat().st_size == size for output, size in zip(outputs, written, strict=True)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        raise OutOfTime

    monkeypatch.setattr(selectors.DefaultSelector, "select", select)
    monkeypatch.setattr(hanging, "stacks", lambda process: f"stacks of {process}")
    with pytest.raises(OutOfTime) as error:
        ranks.run(pool_cases.wait_for, 2, rank=1)
    monkeypatch.undo()
    (told,) = error.value.__notes__
    zero, one = told.split("rank 1 has not ended")
    assert zero.startswith("pool_cases:wait_for on 2 ranks\nrank 0 has not ended")
    for process, stood in zip(waiting, (zero, one), strict=True):
        assert "in wait_for" in stood
        assert "gloo:barrier 1 of group" in stood
        assert f"stacks of {process}" in stood
    assert re.search("gloo:all_reduce 2 of .*: not finished", zero)
    assert "all_reduce 2" not in one
    assert not any(map(_runs, waiting))
    assert ranks.run(pool_cases.total, 2, value=1.0) == [3.0, 3.0], "and not what the case before has answered"


def test_a_rank_that_dies_is_named_with_what_it_said(ranks: Pool) -> None:
    with pytest.raises(PoolError, match="the process ended with 7") as error:
        ranks.run(pool_cases.die_on, 2, rank=0)
    assert "about to die" in str(error.value)
    assert ranks.run(pool_cases.total, 2, value=1.0) == [3.0, 3.0]


@pytest.mark.slow
def test_ranks_are_forked_by_one_process_and_those_of_a_pool_that_ended_are_gone(tmp_path: Path) -> None:
    with Pool(tmp_path) as own:
        ranks = own.run("os:getpid", 2)
        starters = own.run("os:getppid", 2)
        assert len({*starters, *ranks}) == 3
        os.kill(own._starter.process.pid, signal.SIGKILL)  # type: ignore[union-attr]
        own._starter.process.wait()  # type: ignore[union-attr]
        again = own.run("os:getpid", 2)
        assert not {*again} & {*ranks}
    assert not any(map(_runs, [*starters, *ranks, *again]))


def test_a_result_that_is_not_json_is_an_error(ranks: Pool) -> None:
    with pytest.raises(PoolError, match="not JSON serializable"):
        ranks.run(pool_cases.not_json, 1)


def test_a_world_that_is_too_large_is_refused(ranks: Pool) -> None:
    with pytest.raises(ValueError, match="1 to 8 ranks"):
        ranks.run(pool_cases.total, 9, value=1.0)


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_the_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from forge_train_tools.testing import Pool\n"
        "pool = Pool(Path(sys.argv[1])); print(pool.run('os:getpid', 2)); sys.stdout.flush(); os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    deadline = time.monotonic() + 600
    processes = [int(one) for one in done.stdout.strip(" []\n").split(",")]
    while alive := [one for one in processes if _runs(one)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return "Z (" not in Path(f"/proc/{process}/stat").read_text() and _state(process) != "Z"


def _state(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
