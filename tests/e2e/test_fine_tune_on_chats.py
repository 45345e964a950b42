"""The page “Fine-tune on your chats”, from its first command to its last line of Python."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

import chat_model
from forge_cli import forge

pytest.importorskip("transformers")
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "fine-tune-on-chats.md"
SMALL = "run.device=cpu;train.steps=100;train.global_batch=4;train.evaluate_batches=1;adamw.lr=5e-3"
"""What learns from nothing in seconds; the page's values are for a model that can speak."""


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.e2e
def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    chat_model.write_model(tmp_path / "hf")
    chat_model.write_chats(tmp_path / "chats.jsonl")
    lines = [line.removeprefix("$ ") for block in blocks("console") for line in block.splitlines()]
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("forge ")]
    assert [words[0] for words in commands] == ["train", "checkpoint", "generate"]
    for words in commands:
        ended = forge(*words, environment={"FORGE_SET": SMALL})
        assert ended.code == 0, ended.err
    assert ended.out == "three\n"

    capsys.readouterr()
    chatting, looking = blocks("python")
    names: dict[str, object] = {}
    exec(compile(chatting, str(PAGE), "exec"), names)
    assert capsys.readouterr().out == "three\n"
    exec(compile(looking, str(PAGE), "exec"), {})
    assert "['zero<|im_end|>']" in capsys.readouterr().out

    tokenizer, model = names["tokenizer"], names["model"]
    for digit, word in enumerate(chat_model.WORDS):
        messages = [{"role": "user", "content": f"say {digit}"}]
        prompt = tokenizer.apply_chat_template(  # type: ignore[attr-defined]
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        text = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0]  # type: ignore[attr-defined]
        answer = text[prompt["input_ids"].shape[1] :]
        assert len(answer) < 20
        assert tokenizer.decode(answer) == f"{word}<|im_end|>"  # type: ignore[attr-defined]

    ends = json.loads((tmp_path / "tuned-hf" / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.convert_ids_to_tokens(ends) == ["<|endoftext|>", "<|im_end|>"]  # type: ignore[attr-defined]
    again = forge(*commands[0], environment={"FORGE_SET": SMALL})
    assert again.code == 0
    assert "imported" not in again.err
