"""The page “Evaluate”, each command typed as it stands there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge_cli import forge
from pages import at_a_desk, blocks, typed

pytest.importorskip("transformers")
pytest.importorskip("lm_eval")
pytestmark = [pytest.mark.e2e, pytest.mark.dist, pytest.mark.slow]
PAGE = "evaluate.md"


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    at_a_desk(tmp_path, monkeypatch)
    monkeypatch.setenv("FORGE_SET", "run.device=cpu")
    for name, kind in (("numbers.jsonl", "json"), ("tasks.toml", "toml"), ("comes.yaml", "yaml")):
        Path(name).write_text(blocks(PAGE, kind)[0], encoding="utf-8")
    said = []
    for words in typed(PAGE):
        ended = forge(*words)
        assert ended.code == 0, ended.err
        said.append(ended)
    capsys.readouterr()
    exec(blocks(PAGE, "python")[0], {})  # what a reader would type
    value = float(capsys.readouterr().out)
    kept = Path("runs/tuned/evaluations/step-00000006")
    assert value == json.loads((kept / "numbers.json").read_text())["metrics"]["accuracy"]["value"]
    assert [one.name for one in sorted(Path("answers").iterdir())] == [
        f"{task}.{suffix}" for task in ("numbers", "prose", "writing") for suffix in ("json", "jsonl")
    ]
    assert "acc_norm" in said[3].out
    assert "Paired, by record" in said[7].out
    assert "lm_eval.comes.acc_norm" in Path("runs/watched/events.jsonl").read_text()
    assert "p = " in said[8].out
