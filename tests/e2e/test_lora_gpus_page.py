"""The page “Fine-tune with LoRA on eight GPUs”, typed with two processes in the place of eight."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import chat_model
from forge_cli import forge
from pages import typed

pytest.importorskip("transformers")
SMALL = "run.device=cpu;train.global_batch=8;train.evaluate_batches=1;adamw.weight_decay=0"
READER = {
    "adamw.lr=2e-4": "adamw.lr=1e-2",
    "8": "2",
    "train.steps=400": "train.steps=44",
    "train.micro_batch=1": "train.micro_batch=4",
}


@pytest.mark.e2e
@pytest.mark.dist
@pytest.mark.slow
def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    chat_model.write_model(tmp_path / "hf", head=10)
    chat_model.write_chats(tmp_path / "chats.jsonl")
    said = {}
    for words in typed("lora-gpus.md"):
        steps = ";train.steps=40" if "--resume" not in words else ""
        own = [READER.get(word, word) for word in words]
        ended = forge(*own, *(["--json"] if words[0] == "plan" else []), environment={"FORGE_SET": SMALL + steps})
        assert ended.code == 0, ended.err
        said[" ".join(words[:2])] = ended
    assert list(said) == [
        "plan hf",
        "verify hf",
        "train hf",
        "train --resume",
        "generate runs/tuned",
        "checkpoint export",
    ]
    assert {one["axis"] for one in json.loads(said["plan hf"].out)["communication"]} == {"dp_shard"}
    assert "They agree." in said["verify hf"].out
    events = [json.loads(line) for line in Path("runs/tuned/events.jsonl").read_text().splitlines()]
    assert [one["world"] for one in events if one["event"] == "run_started"] == [2, 1]
    assert [one["step"] for one in events if one["event"] == "resumed"] == [40]
    assert said["generate runs/tuned"].out == "three\n"
