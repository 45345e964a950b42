"""Chats as prompts: the tokens and the answers of `transformers`, and what is left of a chat that is too long."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import chat_model
from forge_cli import forge, one_message
from forge_train import ConfigError
from forge_train_tools import generate, open_model
from forge_train_tools.generation import chats
from forge_train_tools.generation.chats import shorter

pytest.importorskip("transformers")
pytestmark = pytest.mark.unit

CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "say 3"},
    {"role": "assistant", "content": "three"},
    {"role": "user", "content": "say 4"},
]


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "hf"
    chat_model.write_model(folder, head=8.0)
    return folder


def by_transformers(
    folder: Path, messages: list[dict[str, str]], *, tools: list[dict[str, Any]] | None = None, **options: Any
) -> list[int]:
    """Greedy tokens after a chat, with the end."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    given = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    found = model.generate(**given, do_sample=False, **options)
    return [int(one) for one in found[0, given["input_ids"].shape[1] :]]


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_a_chat_is_answered_as_by_transformers(hf: Path, penalty: float) -> None:
    (found,) = generate(
        hf, [{"messages": CHAT}], tokens=20, temperature=0, repetition_penalty=penalty, logprobs=True
    ).answers
    expected = by_transformers(hf, CHAT, max_new_tokens=20, repetition_penalty=penalty)
    assert list(found.ids or ()) == expected
    assert len(set(expected)) > 5


def test_an_answer_ends_as_the_files_of_the_model_say(hf: Path, tmp_path: Path) -> None:
    """With the `eos_token_id` of generation_config.json, one or several, which is not the tokenizer's."""
    third = by_transformers(hf, CHAT, max_new_tokens=20)[2]
    folder = tmp_path / "hf"
    shutil.copytree(hf, folder)
    file = folder / "generation_config.json"
    for ends in (third, [0, third]):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": ends}))
        (found,) = generate(folder, [{"messages": CHAT}], tokens=20, temperature=0, logprobs=True).answers
        assert list(found.ids or ()) == by_transformers(folder, CHAT, max_new_tokens=20)
        assert (found.stopped, found.tokens, (found.ids or ())[-1]) == ("end", 2, third)


def test_a_prompt_with_chat_is_a_users_message(hf: Path) -> None:
    own = generate(hf, "say 4", chat=True, tokens=8, temperature=0).answers[0].text
    assert own == generate(hf, [{"messages": [CHAT[-1]]}], tokens=8, temperature=0).answers[0].text
    assert own == open_model(hf).generate("say 4", chat=True, tokens=8, temperature=0)
    assert own != generate(hf, "say 4", tokens=8, temperature=0).answers[0].text


def test_a_prompt_with_chat_has_the_system_and_the_tools_beside_it(hf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    shutil.copytree(hf, folder)
    (folder / "chat_template.jinja").write_text(
        "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}" + chat_model.CHATML
    )
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    asked = [{"prompt": "say 4", **beside} for beside in ({}, {"system": "be brief"}, {"tools": tools})]
    found = generate(folder, asked, chat=True, tokens=8, temperature=0, logprobs=True).answers
    plain, system, tool = (list(one.ids or ()) for one in found)
    assert plain == by_transformers(folder, CHAT[3:], max_new_tokens=8)
    assert system == by_transformers(folder, [CHAT[0], CHAT[3]], max_new_tokens=8) != plain
    assert tool == by_transformers(folder, CHAT[3:], tools=tools, max_new_tokens=8) != plain
    (tmp_path / "a.jsonl").write_text(json.dumps({"q": "say 4", "prompt": "no", "system": "be brief"}) + "\n")
    more = ("--from-file", tmp_path / "a.jsonl", "--field", "q", "--temperature", 0, "--tokens", 8, "--logprobs")
    assert forge("generate", folder, "--chat", *more, "--out", tmp_path / "b.jsonl").code == 0
    assert json.loads((tmp_path / "b.jsonl").read_text())["ids"] == system


def test_values_of_generation_config_that_are_not_used_are_told_once(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    folder, records = tmp_path / "hf", tmp_path / "a.jsonl"
    shutil.copytree(hf, folder)
    file = folder / "generation_config.json"
    records.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')

    def told(command: str, *more: object) -> list[str]:
        ended = forge(command, folder, "--tokens", 2, *more)
        assert ended.code == 0, ended.err
        return [line for line in ended.err.splitlines() if "generation_config.json" in line]

    assert told("generate", "--prompt", "a") == []
    written = {"temperature": 0.6, "top_k": 20, "top_p": 1.0, "no_repeat_ngram_size": 0, "suppress_tokens": [3]}
    file.write_text(json.dumps(json.loads(file.read_text()) | written))
    text = "not used: temperature 0.6, top_k 20 (give them as options); suppress_tokens [3] (there is no such option)."
    many = ("--from-file", records, "--out")
    for asked in (
        ("generate", "--prompt", "a"),
        ("generate", "--prompt", "a", "--prompt", "b"),
        ("generate", *many, tmp_path / "b.jsonl"),
        ("chat",),
    ):
        (line,) = told(*asked)
        assert line.endswith(f"{file}: {text}")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"suppress_tokens": None}))
    assert told("generate", "--prompt", "a", "--temperature", 0) == []
    (line,) = told("generate", "--prompt", "a", "--temperature", 0.7)
    assert line.endswith("not used: top_k 20 (give them as options).")


def test_a_chat_becomes_shorter_by_its_oldest_turns() -> None:
    tool = {"role": "tool", "content": "4"}
    messages = [*CHAT[:3], tool, *CHAT[3:]]
    assert [*shorter(messages)] == [messages, [CHAT[0], CHAT[3]]]
    assert [*shorter(CHAT[1:2])] == [CHAT[1:2]]


def test_the_oldest_turns_of_a_long_chat_are_left_out(hf: Path) -> None:
    turn = [{"role": "user", "content": "say one and then"}, {"role": "assistant", "content": "two"}]
    long = [CHAT[0], *10 * turn, CHAT[-1]]
    with pytest.raises(ConfigError, match=r"The prompt: has \d+ tokens, and the model reads 64 at once"):
        generate(hf, [{"messages": long}], tokens=8)
    (found,) = generate(hf, [{"messages": long}], tokens=8, temperature=0, long="left").answers
    tokens = [len(open_model(hf).tokenizer.encode(text)) for text in map(rendered, (long, [CHAT[0], *turn, CHAT[-1]]))]
    assert found.cut == tokens[0] - tokens[1]
    kept = generate(hf, [{"messages": [CHAT[0], *turn, CHAT[-1]]}], tokens=8, temperature=0).answers[0]
    assert found.text == kept.text


def rendered(messages: list[dict[str, str]]) -> str:
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages) + "<|im_start|>assistant\n"


def test_another_template_ends_its_turns(hf: Path) -> None:
    """`<|im_end|>` ends an answer of `--template chatml`, although no file of the model says so."""
    model = open_model(hf)
    (end,) = model.tokenizer.encode("<|im_end|>")
    assert model.chats("chatml").ends == [*model.chats().ends, end]
    assert end not in model.chats().ends


def test_the_end_of_a_turn_ends_chats_and_no_other_text(hf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    third = by_transformers(hf, CHAT, max_new_tokens=20)[2]
    monkeypatch.setattr(chats, "turn_end", lambda *given: third)
    text = rendered(CHAT)
    asked = [{"messages": CHAT}, {"prompt": text}]
    chat, plain = generate(hf, asked, tokens=8, temperature=0, template="chatml", logprobs=True).answers
    assert (chat.stopped, chat.tokens) == ("end", 2)
    assert (plain.stopped, (plain.ids or ())[2]) == ("tokens", third), "the same tokens, and another end"


def test_a_file_that_was_begun_with_another_template_is_not_continued(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forge_train_tools.inference.output_file import OutputFile

    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    asked = ("generate", hf, "--from-file", tmp_path / "a.jsonl", "--out", tmp_path / "b.jsonl", "--tokens", 2)
    with monkeypatch.context() as patch:
        patch.setattr(OutputFile, "finish", lambda self: None)
        assert forge(*asked).code == 0
    assert "was begun with another chat template" in one_message(forge(*asked, "--template", "plain"), 2)
    assert forge(*asked).code == 0


def test_mistakes(hf: Path, tmp_path: Path) -> None:
    def said(*more: object) -> str:
        return one_message(forge("generate", hf, "--chat", "--prompt", "a", *more), 2)

    assert "no chat template 'chatmi'" in said("--template", "chatmi")
    assert "which are no tokens of this tokenizer" in said("--template", "llama3")
    file = tmp_path / "own.jinja"
    file.write_text("{{ raise_exception('no') }}")
    assert "own.jinja: no" in said("--template", file)
    with pytest.raises(
        ConfigError, match=r"messages: expected a user's last message to answer; it is the assistant's\."
    ):
        generate(hf, [{"messages": CHAT[:3]}])
    (hf / "chat_template.jinja").rename(tmp_path / "away")
    try:
        assert "--template: " in said()
        assert "has no chat template" in said()
        assert forge("generate", hf, "--chat", "--prompt", "a", "--template", "chatml", "--tokens", "2").code == 0
    finally:
        (tmp_path / "away").rename(hf / "chat_template.jinja")
