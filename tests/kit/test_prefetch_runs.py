"""Runs that read ahead: the same numbers, less waiting, broken samples counted, nothing left behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from forge_cli import DECODER, start
from forge_train import ForgeError, Plugin, hookimpl
from forge_train_tools.testing import Pool, TinyRun, run_forge
from odd_data import OddData
from test_prefetch import children, lives, readers

MODES: dict[str, dict[str, Any]] = {
    "inline": {},
    "threads": {"odd_data.prefetch.workers": 3},
    "processes": {"odd_data.prefetch.workers": 2, "odd_data.prefetch.kind": "processes"},
}
SKIP = {"odd_data.prefetch.on_error": "skip", "odd_data.broken": (3, 9, 10)}


def run(folder: Path, mode: str = "inline", *plugins: Any, **more: Any) -> TinyRun:
    return run_forge([OddData, *plugins], {**MODES[mode], **more.pop("config", {})}, folder=folder / mode, **more)


def skips(found: TinyRun) -> list[float | None]:
    return [line.get("odd_data.skipped") for line in found.metrics]


@pytest.mark.slow
@pytest.mark.unit
def test_numbers_do_not_depend_on_how_it_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = {mode: run(tmp_path, mode, config=SKIP, steps=4) for mode in MODES}
    assert found["threads"].numbers == found["inline"].numbers == found["processes"].numbers
    assert skips(found["inline"]) == [1.0, None, 2.0, None]
    assert "sample 9 (odd.bin, document 9) can't be read: stage decode: ValueError: not a picture." in caplog.text
    assert "3 samples could not be read" in caplog.text
    run(tmp_path, "threads", config=SKIP, steps=4, name="resumed", stop_at=2)
    resumed = run(tmp_path, "threads", config={**SKIP, "odd_data.prefetch.workers": 1}, steps=4, name="resumed")
    assert resumed.numbers == found["inline"].numbers
    assert not readers()


@pytest.mark.unit
@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_fails_leaves_nothing(tmp_path: Path, mode: str) -> None:
    before = children()
    with pytest.raises(ForgeError, match=r"sample 9 \(odd.bin, document 9\) can't be read: stage decode") as failed:
        run(tmp_path, mode, config={"odd_data.broken": (9,)}, steps=4)
    assert failed.value.type == "data"
    assert not readers()
    assert children() == before


class Slow(Plugin):
    """A step that takes 0.1 s more."""

    api = (1, 0)

    @hookimpl
    def on_gradients(self, update: Any) -> None:
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.unit
def test_waiting_for_a_slow_source_becomes_less(tmp_path: Path) -> None:
    """A step takes 0.1 s and its two micro-batches 0.1 s: half of the time is waiting, or next to none."""
    config = {"odd_data.seconds": 0.05}
    waits = {
        mode: [line["data_wait"] for line in run(tmp_path, mode, Slow, config=config, steps=8).metrics[2:]]
        for mode in ("inline", "threads")
    }
    assert sorted(waits["threads"])[3] < sorted(waits["inline"])[3] / 2


def counted(folder: str) -> tuple[list[float], list[float | None]]:
    found = run(Path(folder), "threads", config=SKIP, steps=4)
    return found.losses, skips(found)


@pytest.mark.slow
@pytest.mark.dist
def test_two_ranks_count_what_both_left_out(ranks: Pool, tmp_path: Path) -> None:
    alone = run(tmp_path, config=SKIP, steps=4)
    for losses, found in ranks.run(counted, 2, folder=str(tmp_path / "two")):
        assert losses == pytest.approx(alone.losses, rel=1e-5)
        assert found == skips(alone)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("how", [pytest.param(signal.SIGTERM, marks=pytest.mark.extended), signal.SIGINT])
def test_a_run_that_is_told_to_stop_saves_and_leaves_no_process(tmp_path: Path, how: signal.Signals) -> None:
    (tmp_path / "x.txt").write_text("some words to learn from\n" * 4000)
    (tmp_path / "x.toml").write_text(DECODER)
    prefetch = ("-s", "text.prefetch.workers=2", "-s", "text.prefetch.kind=processes")
    settings = ("-s", "text.path=x.txt", "-s", "train.steps=100000", "-s", f"text.cache={tmp_path / 'cache'}")
    process = start(
        "train", "x.toml", *settings, *prefetch, "--name", "x", preloaded=True, cwd=tmp_path, start_new_session=True
    )
    metrics, deadline = tmp_path / "runs/x/metrics.jsonl", time.monotonic() + 300
    while not (metrics.is_file() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.1)
    readers = {
        pid
        for pid in children(process.pid)
        if b"forge_train_kit.data.child" in Path(f"/proc/{pid}/cmdline").read_bytes()
    }
    assert len(readers) == 2
    os.killpg(process.pid, how)  # as a terminal or a scheduler does: workers get it too
    out, err = process.communicate(timeout=300)
    assert process.returncode == 75, err
    assert "saved step-" in out + err
    assert not any(map(lives, readers))
