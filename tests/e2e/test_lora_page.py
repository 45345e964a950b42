"""The page “Fine-tune with LoRA on a laptop”, from its first command to its last line of Python."""

from __future__ import annotations

from pathlib import Path

import pytest

import chat_model
from forge_cli import forge
from pages import blocks, typed

pytest.importorskip("transformers")
PAGE = "lora.md"
SMALL = "run.device=cpu;train.steps=100;train.global_batch=8;train.evaluate_batches=1;adamw.weight_decay=0"
RATE = ("adamw.lr=2e-4", "adamw.lr=1e-2")
"""The page's is for a model that can speak; what adapts random weights in seconds."""


@pytest.mark.slow
@pytest.mark.e2e
def test_an_adapter_brings_the_chat_template_that_its_base_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    chat_model.write_model(tmp_path / "hf", head=10)
    (tmp_path / "hf" / "chat_template.jinja").unlink()
    chat_model.write_chats(tmp_path / "chats.jsonl")
    chats = ("-s", "sft.path=chats.jsonl", "-s", "sft.template=chatml", "-s", "adamw.lr=1e-2", "--name", "tuned")
    for words in (
        ("train", "hf", "-p", "lora,sft", *chats),
        ("checkpoint", "export", "runs/tuned", "adapter", "--adapter"),
    ):
        ended = forge(*words, environment={"FORGE_SET": SMALL})
        assert ended.code == 0, ended.err
    for folder in (("runs/tuned",), ("hf", "--adapter", "adapter")):
        asked = forge("generate", *folder, "--chat", "--prompt", "say 7", "--temperature", "0", "--tokens", "9")
        assert asked.out == "seven\n", asked.err


@pytest.mark.e2e
@pytest.mark.slow
def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    chat_model.write_model(tmp_path / "hf", head=10)
    chat_model.write_chats(tmp_path / "chats.jsonl")
    commands = [[word.replace(*RATE) for word in words] for words in typed(PAGE)]
    assert [words[0] for words in commands] == ["train", "generate", "checkpoint", "checkpoint", "train", "train"]
    (tmp_path / "lora.toml").write_text(blocks(PAGE, "toml")[0])
    said = []
    for words in commands:
        ended = forge(*words, environment={"FORGE_SET": SMALL})
        assert ended.code == 0, ended.err
        said.append(ended.out)
    assert said[1] == "three\n"
    for folder in ("runs/tuned", "tuned-hf"):
        asked = forge("generate", folder, "--chat", "--prompt", "say 7", "--temperature", "0")
        assert asked.out == "seven\n", asked.err

    free = ("-s", "checkpoint.only=[]", "-s", "train.init_missing=[]")
    planned = forge("plan", "lora.toml", "-s", "train.steps=3", "-s", "decoder.layers=2", *free, "--json")
    assert planned.code == 0, planned.err
    pytest.importorskip("peft")
    capsys.readouterr()
    exec(compile(blocks(PAGE, "python")[0], PAGE, "exec"), {})
    assert capsys.readouterr().out.startswith("three")
