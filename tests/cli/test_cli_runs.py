"""`forge runs`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge_command import Forge, typed


@pytest.fixture
def two(forge: Forge, folder: Path) -> Path:
    forge("train", "tiny.toml", "--name", "first", "-q")
    forge("train", "tiny.toml", "--name", "second", "-q", "-p", "lion", "-s", "train.steps=4")
    return folder / "runs"


def test_list(forge: Forge, two: Path) -> None:
    runs = forge("runs", "list", "--json").json
    assert [(Path(run["run"]).name, run["outcome"], run["step"]) for run in runs] == [
        ("second", "done", 4),
        ("first", "done", 6),
    ]
    assert runs[1]["loss"] > 0
    assert runs[1]["evaluation"]["step"] == 6
    lines = forge("runs", "list").out.splitlines()
    assert [line.split()[0] for line in lines] == ["run", "second", "first"]


def test_list_of_nothing(forge: Forge) -> None:
    assert "Start one with: forge train" in forge("runs", "list").out
    assert forge("runs", "list", "--json").json == []


def test_show(forge: Forge, two: Path) -> None:
    text = forge("runs", "show", "first").out
    assert "done at step 6" in text
    assert "step-00000006" in text
    assert "adamw" in text
    assert any(block in text for block in "▁█")
    details = forge("runs", "show", "runs/first", "--json").json
    assert [line["step"] for line in details["metrics"]] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in details["evaluations"]] == [3, 6]
    assert details["config"]["train.steps"] == 6
    assert details["environment"]["torch"]


def test_show_without_a_name_is_the_newest(forge: Forge, two: Path) -> None:
    assert forge("runs", "show").out.startswith("second\n")


def test_a_killed_run_shows_what_there_is(forge: Forge, two: Path) -> None:
    (two / "first" / "outcome.json").unlink()
    metrics = two / "first" / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-30])  # cut off while it was written
    text = forge("runs", "show", "first").out
    assert "unfinished at step 5" in text


def test_compare(forge: Forge, two: Path) -> None:
    found = forge("runs", "compare", "first", "second", "--json").json
    assert "version" not in found["results"], "that is the schema's, and no result"
    assert found["runs"] == ["runs/first", "runs/second"]
    assert found["config"]["train.steps"] == {"runs/first": 6, "runs/second": 4}
    assert found["config"]["lion.lr"]["runs/first"] is None
    assert "train.sequence" not in found["config"]
    assert found["results"]["step"] == {"runs/first": 6, "runs/second": 4}
    assert found["results"]["held out loss"]["runs/first"] > 0
    text = forge("runs", "compare", "first", "second").out
    assert "train.steps" in text
    assert "curve" in text


def test_compared_runs_stand_beside_each_other_where_they_fit(two: Path) -> None:
    """However long they are: their curves take the room that there is."""
    for name in ("first", "second"):
        metrics = two / name / "metrics.jsonl"
        last = json.loads(metrics.read_text().splitlines()[-1])
        more = (json.dumps({**last, "step": step}) for step in range(last["step"] + 1, 100))
        metrics.write_text(metrics.read_text() + "\n".join([*more, ""]))
    lines = typed("runs", "compare", "first", "second", "--run-dir", str(two), columns=80)
    (curve,) = [line.split() for line in lines if line.startswith("  curve ")]
    assert len(curve) == 3
    assert len(curve[1]) == len(curve[2]) >= 18
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["show", "frist"], "there is no such run, here or in runs. Did you mean 'first'?"),
        (["show", "first", "--run-dir", "tiny.toml"], "tiny.toml is not a folder of runs"),
        (["compare", "first"], "at least two runs"),
        (["compare"], "Missing argument"),
        (["lst"], "Did you mean 'list'?"),
    ],
)
def test_mistakes(forge: Forge, two: Path, arguments: list[str], says: str) -> None:
    assert says in forge("runs", *arguments, fails=2).err


def test_a_damaged_file_is_named(forge: Forge, two: Path) -> None:
    (two / "first" / "plugins.json").write_text("{")
    assert "plugins.json: can't be read" in forge("runs", "show", "first", fails=2).err
    (two / "second" / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0}) + "\nnonsense\n")
    assert "metrics.jsonl: can't be read" in forge("runs", "show", "second", fails=2).err
    listed = forge("runs", "list", "--json")
    assert listed.json == []
    assert listed.err.count("Warning: ") == 2
    (two / "second" / "metrics.jsonl").write_text("")
    assert [Path(run["run"]).name for run in forge("runs", "list", "--json").json] == ["second"]
