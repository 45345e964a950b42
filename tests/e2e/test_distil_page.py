"""The page “Distil”, each command typed as it stands there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge_cli import forge
from pages import at_a_desk, blocks, typed

pytest.importorskip("transformers")
pytestmark = pytest.mark.e2e
PAGE = "distil.md"
SMALL = "run.device=cpu;train.steps=20;train.global_batch=4;train.evaluate_every=0;text.held_out=0;distill.share=1.0"
"""The page's share is for a teacher that knows its text, and this one is random."""


@pytest.mark.slow
def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_a_desk(tmp_path, monkeypatch)
    (tmp_path / "student.toml").write_text(blocks(PAGE, "toml")[0], encoding="utf-8")
    commands = typed(PAGE)
    assert [words[0] for words in commands] == ["checkpoint", "train", "generate", "train"]
    shown = forge("config", "show", "student.toml")
    assert shown.code == 0, shown.err
    for words in commands:
        ended = forge(*words, environment={"FORGE_SET": SMALL} if words[0] == "train" else {})
        assert ended.code == 0, ended.err
    for name in ("student", "from-a-folder"):
        lines = [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        assert lines[-1]["distill.divergence"] < lines[0]["distill.divergence"]
    assert json.loads((tmp_path / "logits" / "logits.json").read_text())["covers"]["train"]["whole"]
