"""`profile`: the asked-for steps, with their spans, in a trace and a table that a report shows."""

from __future__ import annotations

import gzip
import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge_cli import forge
from forge_train import ConfigError
from forge_train.run.run import Run
from forge_train_plugins.observers._profile.timeline import Activity, Split, split
from forge_train_plugins.observers._profile.window import Window
from forge_train_tools.testing import Pool, RunForge
from hot_path import Watch, counting, waits


@pytest.mark.slow
def test_the_steps_that_were_asked_for_and_their_operations(run_forge: RunForge, tmp_path: Path) -> None:
    run = run_forge(["profile"], {"profile.start": 3, "profile.steps": 2}, steps=6, folder=tmp_path)
    with gzip.open(run.run / "artifacts" / "profile" / "trace-rank-0.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    spans = [event["name"] for event in events if str(event.get("name", "")).startswith("forge ")]
    assert {name: spans.count(name) for name in spans if "user_annotation" not in name} == {
        "forge step": 2,
        "forge forward_backward": 2,
        "forge optimizer": 2,
    }
    table = (run.run / "artifacts" / "profile" / "rank-0.txt").read_text()
    assert table.startswith("2 steps from step 3 after the start, on rank 0 (cpu)\n")
    assert "aten::mm" in table
    page = tmp_path / "report.html"
    assert forge("runs", "report", run.run, "--output", page).code == 0
    assert "<summary>Profile</summary>" in page.read_text()
    assert "aten::mm" in page.read_text()
    assert run.numbers == run_forge(steps=6, name="without", folder=tmp_path).numbers


def test_a_run_that_is_too_short_says_so(run_forge: RunForge, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "forge_train"):
        run = run_forge(["profile"], steps=3)
    assert "There is no profile: it needs 12 steps, and there were 3 (profile.start)." in caplog.text
    assert not (run.run / "artifacts" / "profile").exists()


def test_it_waits_for_nothing_but_in_its_window(run_forge: RunForge) -> None:
    with counting(4) as found:
        run_forge(["profile", Watch], {"log.every": 4, "profile.start": 20}, steps=12)
    assert waits(found) == {}


def at(name: str, start: float, end: float, thread: int = 1, **more: bool) -> Activity:
    return Activity(name, thread, 1e3 * start, 1e3 * end, **more)  # of milliseconds


def test_a_cpu_time_line_with_a_known_answer() -> None:
    """Two steps of 50 ms: gloo is at work for 31, of which 13 are not beside an operation."""
    found = split(
        [
            at("forge step", 0, 50, annotation=True),
            at("aten::linear", 2, 20),
            at("aten::mm", 5, 20),  # inside
            at("gloo:all_gather", 10, 25, thread=2, annotation=True),  # 5 exposed
            at("aten::copy_", 11, 25, thread=2),  # gloo's own
            at("autograd::engine::evaluate_function: MmBackward0", 25, 50),
            at("aten::foreach", 26, 40),  # a DTensor's: waits inside
            at("_c10d_functional::wait_tensor", 30, 38),
            at("gloo:all_reduce", 28, 38, thread=3, annotation=True),  # 8 exposed
            at("gloo:all_reduce", 29, 34, thread=2, annotation=True),  # beside another one
            at("forge step", 50, 100, annotation=True),
            at("aten::mm", 60, 90, thread=4),
            at("gloo:all_reduce", 70, 76, thread=2, annotation=True),
        ]
    )
    assert found is not None
    assert found == Split(*map(pytest.approx, (0.1, 0.018 + 0.006 + 0.030, 0.031, 0.013)))
    assert found.line(2) == (
        "Milliseconds of a step: whole 50.000, computing 27.000, communication 15.500, exposed communication 6.500, "
        "neither 16.500"
    )
    assert split([at("aten::mm", 0, 1)]) is None


def test_a_devices_time_line_with_a_known_answer() -> None:
    found = split(
        [
            at("forge step", 0, 20, annotation=True),
            at("aten::mm", 0, 1),  # only queues
            at("forge step", 5, 30, thread=7, device=True, annotation=True),
            at("sm90_gemm", 5, 15, thread=7, device=True),
            at("ncclDevKernel_AllGather_RING_LL", 10, 22, thread=8, device=True),
            at("Memcpy DtoD", 20, 21, thread=7, device=True),
            at("sm90_gemm", 24, 30, thread=7, device=True),
        ]
    )
    assert found == Split(*map(pytest.approx, (0.030, 0.017, 0.012, 0.006)))


@pytest.mark.slow
@pytest.mark.dist
def test_a_late_rank_is_exposed_communication_on_the_other(ranks: Pool, tmp_path: Path) -> None:
    (folder, *_) = ranks.run("profile_cases:train", 2, folder=str(tmp_path))
    exposed, whole = [], []
    for rank in range(2):
        text = (Path(folder) / "artifacts" / "profile" / f"rank-{rank}.txt").read_text()
        line = text.splitlines()[1].partition(": ")[2]
        found = {name: float(value) for name, value in re.findall(r"([a-z ]+[a-z]) ([\d.]+)", line)}
        found = {name.strip(): value for name, value in found.items()}
        assert 0 < found["exposed communication"] <= found["communication"] + 1e-3
        assert found["computing"] > 0
        assert found["neither"] >= 0
        exposed.append(found["exposed communication"])
        whole.append(found["whole"])
    assert whole[0] > exposed[0] >= 60
    assert exposed[1] < exposed[0] - 30


@pytest.mark.parametrize("option", ["snapshot", "nvtx"])
def test_what_only_cuda_has_is_refused_elsewhere(option: str, run_forge: RunForge) -> None:
    with pytest.raises(ConfigError, match=rf"^profile\.{option}: needs a CUDA device; this run's is cpu\."):
        run_forge(["profile"], {f"profile.{option}": True})


def test_options_without_effect_are_refused(run_forge: RunForge) -> None:
    with pytest.raises(ConfigError, match="profile.nvtx is off; leave the plugin out"):
        run_forge(["profile"], {"profile.steps": 0})


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_on_cuda_ranges_are_around_all_spans_and_a_snapshot_is_of_the_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: told.append(name))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: told.append("pop"))
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **how: told.append(sorted(how)))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda file: Path(file).write_bytes(b"history"))
    config = SimpleNamespace(start=2, steps=1, rows=5, shapes=False, memory=False, snapshot=True, nvtx=True)
    recorded: list[str] = []
    job: Any = SimpleNamespace(
        device=torch.device("cuda"),
        dist=SimpleNamespace(rank=0, main=True),
        run=Run(tmp_path),
        record=lambda file, author: recorded.append(file.name),
    )
    window = Window(job, config)
    for _ in range(3):
        with window.span("step"), window.span("optimizer"):
            pass
    spans = ["forge step", "forge optimizer", "pop", "pop"]
    began, ended = [["max_entries"]], [["enabled"]]
    assert told == [*spans, "forge step", *began, "forge optimizer", "pop", *ended, "pop", *spans]
    assert recorded == ["trace-rank-0.json.gz", "rank-0.txt", "memory-rank-0.pickle"]
