"""`forge infer` of records with items on layouts of two ranks, against one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import items_data
import tiny_models
from crossed import marked
from forge_cli import forge

pytestmark = [pytest.mark.dist, pytest.mark.e2e]

LAYOUTS: dict[str, tuple[str, ...]] = {
    "cp2": ("-p", "cp", "-s", "parallel.cp=2"),
    "fsdp2": ("-p", "fsdp2"),
    "tp2": ("-p", "tp", "-s", "parallel.tp=2"),
    "pp2": ("-p", "pp", "-s", "parallel.pp=2"),
}
CASES = {f"{fusion}, {layout}": (fusion, layout) for fusion in ("prefix", "cross_attention") for layout in LAYOUTS}


@pytest.mark.parametrize("case", marked(CASES, [one for one in CASES if one != "cross_attention, cp2"]))
def test_gives_the_answers_of_one_process(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fusion, layout = CASES[case]
    monkeypatch.setenv("PYTHONPATH", str(Path(items_data.__file__).parent))
    items_data.write_scans(tmp_path, (2, 5, 3))
    given = [{"text": "<scan>" * (at % 3) + "word " * at, "scans": ["0.npy", "1.npy"][: at % 3]} for at in range(1, 8)]
    items_data.write_records(tmp_path / "in.jsonl", given)
    settings = ("cross_attention.every=1", "cross_attention.gate=1.0") if fusion == "cross_attention" else ()
    run = tiny_models.trained(tmp_path, *settings, plugins=("items_data:Scans", fusion))

    def infer(name: str, *layout: str) -> list[dict[str, Any]]:
        asked = ("--data", tmp_path / "in.jsonl", "--out", tmp_path / name, "--batch", "2")
        ended = forge("infer", run, *asked, "--outputs", "log_likelihood,hidden", *layout)
        assert ended.code == 0, ended.err
        return [json.loads(line) for line in (tmp_path / name).read_text(encoding="utf-8").splitlines()]

    whole, found = infer("one.jsonl"), infer("two.jsonl", "--nproc", "2", *LAYOUTS[layout])
    assert len(found) == len(given)
    for mine, theirs in zip(found, whole, strict=True):
        assert mine == {name: pytest.approx(value, abs=1e-4) for name, value in theirs.items()}


@pytest.mark.extended
@pytest.mark.parametrize("case", CASES)
def test_choices_are_scored_as_one_process_does(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fusion, layout = CASES[case]
    monkeypatch.setenv("PYTHONPATH", str(Path(items_data.__file__).parent))
    items_data.write_scans(tmp_path, (2, 5, 3))
    given = [
        {"prompt": "<scan>is" * (at % 2), "choices": ["a", "bb"], "answer": 0, "shown": ["0.npy", "2.npy"][: at % 2]}
        for at in range(1, 6)
    ]
    items_data.write_records(tmp_path / "asked.jsonl", given)
    task = '[seen]\nkind = "choice"\ndata = "asked.jsonl"\nitems = { scan = "shown" }\n'
    (tmp_path / "seen.toml").write_text(task, encoding="utf-8")
    settings = ("cross_attention.every=1", "cross_attention.gate=1.0") if fusion == "cross_attention" else ()
    run = tiny_models.trained(tmp_path, *settings, plugins=("items_data:Scans", fusion))

    def scores(name: str, *layout: str) -> list[list[float]]:
        asked = ("--task", tmp_path / "seen.toml", "--samples", tmp_path / name, "--batch", "2")
        ended = forge("eval", run, *asked, *layout)
        assert ended.code == 0, ended.err
        lines = (tmp_path / name / "seen.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["log_likelihoods"] for line in lines]

    whole, found = scores("one"), scores("two", "--nproc", "2", *LAYOUTS[layout])
    assert found == [pytest.approx(each, abs=1e-4) for each in whole]
