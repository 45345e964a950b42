"""The page “Teach preferences”, each command typed as it stands there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import chat_model
from forge_cli import forge
from pages import typed

pytest.importorskip("transformers")
pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SMALL = (
    "run.device=cpu;train.steps=40;train.global_batch=8;train.evaluate_every=0;adamw.lr=5e-3;train.evaluate_batches=1"
)
HELD_OUT = {"dpo,text_pairs": ";text_pairs.held_out=0.2", "kto,text_feedback": ";text_feedback.held_out=0.2"}
"""What learns in seconds; the page's values are for a model that can speak."""


@pytest.mark.extended
def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    chat_model.write_model(tmp_path / "hf")
    pairs = [
        {"prompt": f"{before}say {at}", "chosen": word, "rejected": str(at)}
        for before in chat_model.BEFORE
        for at, word in enumerate(chat_model.WORDS)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in pairs), encoding="utf-8")
    feedback = [
        {"prompt": one["prompt"], "completion": one[kind], "label": kind == "chosen"}
        for one in pairs
        for kind in ("chosen", "rejected")
    ]
    (tmp_path / "feedback.jsonl").write_text("".join(json.dumps(one) + "\n" for one in feedback), encoding="utf-8")
    commands = typed("preferences.md")
    assert [words[0] for words in commands] == ["train", "eval", "generate", "train", "train", "train", "train"]
    said = []
    for words in commands:
        small = SMALL + next((more for plugins, more in HELD_OUT.items() if plugins in words), "")
        ended = forge(*words, environment={"FORGE_SET": small} if words[0] == "train" else {})
        assert ended.code == 0, ended.err
        said.append(ended.out + ended.err)
    assert "accuracy" in said[1]
    for name in ("aligned", "packed", "without-reference", "from-a-file", "judged"):
        task = "kto" if name == "judged" else "dpo"
        file = next((tmp_path / "runs" / name).rglob("metrics.jsonl"))
        metrics = [json.loads(line) for line in file.read_text().splitlines()]
        assert metrics[-1].get("dpo.accuracy", 1) == 1
        assert metrics[-1][f"{task}.margin"] > 1
        assert metrics[-1]["loss"] < metrics[0]["loss"] / (1.2 if task == "kto" else 2)
