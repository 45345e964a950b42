"""`profile`: the asked-for steps, with their spans, in a trace and a table that a report shows."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path

import pytest

from forge_cli import forge
from forge_train.testing import RunForge
from hot_path import Watch, counting, waits


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
