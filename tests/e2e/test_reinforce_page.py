"""The page “Reinforcement learning from a checkable reward”, each command typed as it stands there, for fewer steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forge_cli import forge
from pages import blocks, typed

pytestmark = [pytest.mark.e2e, pytest.mark.dist, pytest.mark.slow]
PAGE = "reinforce.md"


def metrics(run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path("runs") / run / "metrics.jsonl").read_text().splitlines()]


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make, rules, pairs = blocks(PAGE, "python")
    for text in (make, pairs):
        exec(text, {})  # what a reader would type
    Path("rules.py").write_text(rules, encoding="utf-8")
    for name, text in zip(("guess.toml", "answers.toml"), blocks(PAGE, "toml"), strict=True):
        Path(name).write_text(text, encoding="utf-8")
    for words in typed(PAGE):
        steps = 60 if "guess.toml" in words else 6
        ended = forge(*words, environment={"FORGE_SET": f"run.device=cpu;train.steps={steps};log.every=1"})
        assert ended.code == 0, ended.err
    assert "<h2>Samples</h2>" in Path("answers.html").read_text(encoding="utf-8")
    for mine, theirs in zip(metrics("shared"), metrics("answers"), strict=True):
        assert mine["grpo.reward"] == theirs["grpo.reward"]
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
    assert any(line["grpo.reward"] for line in metrics("answers"))
    assert metrics("judged")[0]["grpo.reward"] != metrics("answers")[0]["grpo.reward"]
