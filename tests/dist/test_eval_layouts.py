"""`forge eval --task` on layouts of two ranks, against one process: the same answers, and on some to the last bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import eval_tasks
import forge_cli
from crossed import marked
from forge_cli import forge, one_message

pytestmark = [pytest.mark.dist, pytest.mark.e2e]

SETTINGS = forge_cli.DECODER.replace("layers = 1", "layers = 2") + '[text]\npath = "prose.jsonl"\n'
EXPERTS = ("-p", "moe", "-s", "moe.experts=4", "-s", "moe.top_k=2")
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "fsdp2": ("-p", "fsdp2"),
    "tp2": ("-p", "tp", "-s", "parallel.tp=2"),
    "pp2": ("-p", "pp", "-s", "parallel.pp=2"),
    "cp2": ("-p", "cp", "-s", "parallel.cp=2"),
    "ep2": ("-p", "ep,fsdp2", "-s", "parallel.ep=2"),
}
EXACT = ("fsdp2", "pp2")
"""Layouts on which every row is computed as one process computes it."""


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs, and the answers of one process."""
    folder = tmp_path_factory.mktemp("eval")
    eval_tasks.write_desk(folder)
    (folder / "mine.toml").write_text(SETTINGS, encoding="utf-8")
    written, scored = eval_tasks.TOML.partition("[words]")[1:], eval_tasks.TOML.partition("[words]")[0]
    (folder / "scored.toml").write_text(scored, encoding="utf-8")
    (folder / "written.toml").write_text("".join(written), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, more in (("dense", ()), ("experts", EXPERTS)):
            ended = forge("train", "mine.toml", "--name", name, "--quiet", *more)
            assert ended.code == 0, ended.err
            evaluated(name, name, "--task", "written.toml")
    return folder


def evaluated(run: str, out: str, *more: str) -> dict[str, Any]:
    words = ("--task", "scored.toml", "--batch", "3", "--samples", out, "--json")
    ended = forge("eval", f"runs/{run}", *words, *more)
    assert ended.code == 0, ended.err
    return ended.json


@pytest.mark.parametrize("layout", marked(LAYOUTS, ["fsdp2", "pp2"]))
def test_gives_the_answers_of_one_process(desk: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    monkeypatch.chdir(desk)
    run = "experts" if layout == "ep2" else "dense"
    found = evaluated(run, layout, "--nproc", "2", *LAYOUTS[layout], "--task", "written.toml")
    assert found["world"] == 2
    for task in found["tasks"]:
        mine, theirs = (
            [*map(json.loads, Path(one, f"{task}.jsonl").read_text().splitlines())] for one in (layout, run)
        )
        assert mine == (theirs if layout in EXACT else [near(one) for one in theirs]), task
        metrics = json.loads(Path(run, f"{task}.json").read_text())["metrics"]
        assert {name: one["value"] for name, one in found["tasks"][task]["metrics"].items()} == {
            name: pytest.approx(one["value"], rel=1e-6) for name, one in metrics.items()
        }


def near(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: near(one) for name, one in value.items()}
    if isinstance(value, list):
        return [near(one) for one in value]
    return pytest.approx(value, rel=1e-6) if isinstance(value, float) else value


def test_a_failure_on_the_main_process_ends_the_others(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)
    (desk / "checks.py").write_text("def boom(answer, record):\n    raise KeyError('gone')\n", encoding="utf-8")
    (desk / "boom.toml").write_text(Path("written.toml").read_text() + 'check = "checks.py:boom"\n', encoding="utf-8")
    said = one_message(forge("eval", "runs/dense", "--task", "boom.toml", "--nproc", "2", "-p", "fsdp2"), 2)
    assert "checks.py:boom failed: KeyError: 'gone'" in said
