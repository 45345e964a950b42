"""`watchdog`: the rank that all wait for is named, with its stacks, and the job ends with one message."""

from __future__ import annotations

import json
import os
import queue
import re
import sys
import threading
import time
from pathlib import Path
from traceback import extract_stack
from typing import Any

import pytest

import stalls
import toys
from forge_cli import environment, forge_process
from forge_train_plugins.resilience._watchdog import heart
from forge_train_plugins.resilience._watchdog.verdict import Heartbeat, message
from forge_train_tools.stacks import place
from forge_train_tools.testing import Pool, run_forge

pytestmark = [pytest.mark.dist]
DIST = Path(__file__).parent


def beat(rank: int, marks: int, awaits: str = "", **more: Any) -> Heartbeat:
    return Heartbeat(rank, 9, marks, 7, "data", 31.0, stalled=True, at="my.py:3, in f", awaits=awaits, **more)


def test_whom_the_others_wait_for(tmp_path: Path) -> None:
    """By what is known for certain first: no answer, then how far, then who is busy."""
    waiting = {rank: beat(rank, 40, "all_reduce") for rank in range(4)}

    def verdict(*own: Heartbeat, silent: tuple[int, ...] = ()) -> tuple[int, str]:
        return message({**waiting, **{one.rank: one for one in own}}, set(silent), tmp_path)

    rank, text = verdict(beat(2, 40))
    assert rank == 2
    assert text.splitlines() == [
        "Rank 2 hangs at step 7 (data) for 31 s.",
        "  at my.py:3, in f",
        "Ranks 0, 1, 3 wait for it in all_reduce.",
        f"Stacks and collectives of all ranks are in {tmp_path}.",
    ]
    rank, text = verdict(beat(1, 39, "barrier", last="gloo:barrier number 8"), beat(2, 40))
    assert rank == 1
    assert text.startswith("Rank 1 hangs at step 7 (data) for 31 s, waiting in barrier; its last collective is gloo:ba")
    rank, text = verdict(beat(1, 39), beat(2, 40), silent=(3,))
    assert (rank, "its process on" in text) == (3, True)
    rank, text = verdict()
    assert "All ranks wait for each other" in text


def test_a_place_is_own_code_and_the_collective_it_is_in() -> None:
    """Of a main thread that waits inside a module of Python's own, as in a file that a slow disk answers for."""
    main, answers = threading.main_thread().ident or 0, queue.Queue[Any]()

    def looks() -> None:
        while not any(frame.filename == queue.__file__ for frame in extract_stack(sys._current_frames()[main])):
            time.sleep(0.001)
        answers.put(place())

    threading.Thread(target=looks).start()
    here = answers.get()
    assert re.fullmatch(rf"{re.escape(__file__)}:\d+, in test_a_place_is_own_code_and_the_collective_it_is_in", here.at)
    assert here.awaits == ""


@pytest.mark.unit
def test_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = stalls.train(str(tmp_path), "plugin", monkeypatch.setattr)
    ((rank, text),) = found["said"]
    assert rank == 0
    assert text.startswith("Rank 0 hangs at step 3 (gradients) for 1000 s.\n  at ")
    assert "stalls.py" in text
    assert found["steps"] == 5, "it went on, since nothing ended it"


@pytest.mark.unit
@pytest.mark.parametrize("span", ["step", "forward_backward", "optimizer", "evaluate", "save"])
def test_what_another_plugin_puts_around_a_span_is_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, span: str
) -> None:
    """A save or an evaluation may take longer, whatever it is that takes so long."""
    monkeypatch.setattr(heart, "clock", lambda: stalls.LATE if stalls.Around.late else 0.0)
    monkeypatch.setattr(heart, "end", lambda error, rank: stalls.Around.said.append(str(error)))
    config = {"watchdog.seconds": 1.0, "around.span": span, "checkpoint.every": 2, "train.evaluate_every": 2}
    run = toys.run(tmp_path, "watchdog", "stalls:Around", steps=4, config=config, name="run")
    assert run.finished.step == 4
    if span in ("evaluate", "save"):
        assert stalls.Around.said == []
    else:
        (text,) = stalls.Around.said
        assert text.startswith(f"Rank 0 hangs at step 3 ({span}) for 1000 s.")


@pytest.mark.parametrize("where", ["plugin", "loader", "collective", "stopped"])
def test_the_rank_that_stalls_is_named_with_its_stacks(ranks: Pool, tmp_path: Path, where: str) -> None:
    zero, one = ranks.run("stalls:train", 2, timeout=300, folder=str(tmp_path), where=where)
    ((rank, text),) = zero["said"] + one["said"]
    assert rank == 1, text
    part = "data" if where == "loader" else "gradients"
    expected = f"Rank 1 hangs at step 3 ({part})" if where != "stopped" else "Rank 1 hangs: its process on "
    assert text.startswith(expected), text
    assert re.search(r"\nRank 0 waits for it in \w+\.\n", text), text
    assert text.endswith(f"are in {zero['folder']}.")
    assert {"rank-0.txt", "rank-0-collectives.json"} <= set(zero["stacks"])
    collectives = json.loads((Path(zero["folder"]) / "rank-0-collectives.json").read_text())
    assert any("all_reduce" in entry["profiling_name"] for entry in collectives)
    if where == "stopped":
        assert "does not run, or holds Python's lock" in text
    else:
        assert "stalls.py" in one["mine"]
        assert "stalls.py" in text, "the innermost frame that is not torch's"
    assert ("waiting in all_reduce" in text) is (where == "collective")
    assert (zero["steps"], one["steps"]) == (5, 5)


@pytest.mark.e2e
@pytest.mark.extended
def test_the_job_ends_with_one_message(tmp_path: Path) -> None:
    values = {"trouble.what": "hang", "watchdog.seconds": 10.0, "watchdog.slow_seconds": 90.0}
    file = toys.write_config(tmp_path, "layouts:Replicas", "layouts:Trouble", "watchdog", **values)
    env = environment()
    env["PYTHONPATH"] += f"{os.pathsep}{DIST}"
    command = ("train", file, "--nproc", 2, "--name", "run", "--without", "fsdp2", "--run-dir", tmp_path)
    ended = forge_process(*command, preloaded=True, env=env, cwd=tmp_path, timeout=300)
    assert ended.code == 1, ended.err
    run = tmp_path / "run"
    lines = [line for line in ended.err.splitlines() if "Warning" not in line]
    assert lines[0].startswith("Error: Rank 1 hangs at step 3 (gradients) for "), ended.err
    assert re.match(r"  at \S*layouts.py:\d+, in on_gradients", lines[1])
    assert "Rank 0 ended because of it." in ended.err
    assert "Traceback" not in ended.err
    assert {"rank-0.txt", "rank-1.txt"} <= {path.name for path in (run / "log" / "stalled").iterdir()}
    assert "in on_gradients" in (run / "log" / "stalled" / "rank-1.txt").read_text()
    outcome = json.loads((run / "outcome.json").read_text())
    assert (outcome["code"], outcome["error"]["rank"], outcome["error"]["type"]) == (1, 1, "communication")
    assert json.loads((run / "log" / "alive.json").read_text())["step"] >= 2


@pytest.mark.unit
def test_a_run_that_goes_on_is_alive_and_over_at_the_end(tmp_path: Path) -> None:
    run = run_forge(["watchdog"], {"watchdog.seconds": 60.0, "checkpoint.every": 2}, steps=4, folder=tmp_path)
    alive = json.loads((run.run / "log" / "alive.json").read_text())
    assert (alive["step"], alive["phase"]) == (4, "over")
    assert not list((run.run / "log" / "stalled").iterdir())
