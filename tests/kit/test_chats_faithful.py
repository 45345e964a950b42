"""What a record says is in its rendering, and every learned turn ends with a token that ends it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import chat_model
from forge_train import ConfigError
from forge_train_kit.data.chats import Template, check_written, conversation, open_template, render, tokenise_ended
from forge_train_kit.data.tokenizers import open_tokenizer

pytest.importorskip("jinja2")
pytestmark = pytest.mark.unit

USER, ANSWER = {"role": "user", "content": "ask"}, {"role": "assistant", "content": "tell"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "adds"}}
PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
TEXT = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}" + PROMPT
CALLS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% else %}{{ m.content }}"
    "{% endif %}<|end|>{% endfor %}" + PROMPT
)
LATEST_THOUGHTS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}"
    "</think>{% endif %}{{ m.content }}<|end|>{% endfor %}" + PROMPT
)
LAST_TWO = "{% for m in messages[-2:] %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}" + PROMPT
PARTS = (
    "{% for m in messages %}<|{{ m.role }}|>{% for part in m.content %}{{ part.text }}{% endfor %}<|end|>{% endfor %}"
    + PROMPT
)


def check(source: str, messages: list[dict[str, Any]], **fields: Any) -> str:
    template = Template(source, tokens=["<|end|>"])
    found = conversation({"messages": messages, **fields}, "chats.jsonl, line 7")
    text = render(template, found).text
    check_written(template, found, text)
    return text


@pytest.mark.parametrize(
    ("source", "messages", "fields", "missing"),
    [
        (TEXT, [USER, {**ANSWER, "tool_calls": [CALL]}], {}, r"messages\[1\]\.tool_calls"),
        (TEXT, [USER, {**ANSWER, "reasoning_content": "why"}], {}, r"messages\[1\]\.reasoning_content"),
        (TEXT, [USER, {**ANSWER, "thinking": "why"}], {}, r"messages\[1\]\.thinking"),
        (TEXT, [USER, ANSWER], {"tools": [TOOL]}, "tools"),
        (CALLS, [USER, {**ANSWER, "tool_calls": [CALL]}], {}, r"messages\[1\] \(assistant\)"),
        (LAST_TWO, [USER, ANSWER, USER, ANSWER], {}, r"messages\[0\] \(user\), messages\[1\] \(assistant\)"),
        (LAST_TWO, [{"role": "system", "content": "s" * 99}, USER, ANSWER], {}, r"messages\[0\] \(system\)"),
    ],
)
def test_what_a_template_leaves_out_is_refused(
    source: str, messages: list[dict[str, Any]], fields: dict[str, Any], missing: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^chats.jsonl, line 7: the chat template leaves out {missing}\. Take"):
        check(source, messages, **fields)


def test_what_is_written_is_not_refused() -> None:
    check(TEXT, [USER, ANSWER, USER, ANSWER])
    check(CALLS, [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "3"}])
    thinking = {**ANSWER, "reasoning_content": "why"}
    check(LATEST_THOUGHTS, [USER, thinking, USER, thinking])


def test_a_template_for_lists_of_parts_is_given_parts() -> None:
    assert check(PARTS, [USER, ANSWER]) == "<|user|>ask<|end|><|assistant|>tell<|end|>"


@pytest.mark.parametrize("flag", ["weight", "train", "training", "loss_mask"])
def test_messages_may_be_kept_from_being_learned(flag: str) -> None:
    template = Template(TEXT, tokens=["<|end|>"])
    found = render(template, conversation({"messages": [USER, {**ANSWER, flag: 0}, USER, {**ANSWER, flag: True}]}))
    assert [found.text[start:stop] for start, stop in found.learned] == ["tell<|end|>"]
    assert found.learned[0][1] == len(found.text)
    with pytest.raises(ConfigError, match="line 7: every turn of the assistant has a weight of 0"):
        render(template, conversation({"messages": [USER, {**ANSWER, flag: False}]}, "chats.jsonl, line 7"))
    with pytest.raises(ConfigError, match=f"{flag} is -0.5; expected 0"):
        conversation({"messages": [USER, {**ANSWER, flag: -0.5}]})


def test_flags_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"messages\[1\]: weight and train contradict|train and weight contradict"):
        conversation({"messages": [USER, {**ANSWER, "train": False, "weight": 1}]})


BEGINNING_IS_END = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
NO_END = BEGINNING_IS_END.removeprefix("{{ bos_token }}")
NEXT_ROLE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.mark.parametrize(
    ("source", "special", "stops", "question", "learned"),
    [
        # GPT-2's beginning is its end
        (BEGINNING_IS_END, ["<|end|>"], ["<|end|>"], "ask", ["one\n", "two\n<|end|>"]),
        # a user writes an end
        (NO_END,
         ["<|end|>"], ["<|end|>"], "a<|end|>b", ["one\n", "two\n<|end|>"]),
        # the next role ends a turn, as in GLM
        (NEXT_ROLE, ["<|end|>", "<|user|>", "<|assistant|>"], ["<|end|>", "<|user|>"], "ask",
         ["one<|user|>", "two<|end|>"]),
        # each turn ends by itself
        (TEXT, ["<|end|>", "<|user|>", "<|assistant|>"], ["<|end|>", "<|user|>"], "ask", ["one<|end|>", "two<|end|>"]),
    ],
    ids=["beginning", "written", "next-role", "own"],
)  # fmt: skip
def test_every_learned_turn_ends(
    tmp_path: Path, source: str, special: list[str], stops: list[str], question: str, learned: list[str]
) -> None:
    pytest.importorskip("transformers")
    chat_model.write_tokenizer(tmp_path, source, special)
    ids_of = [special.index(stop) for stop in stops]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids_of}), encoding="utf-8")
    tokenizer = open_tokenizer(str(tmp_path))
    template = Template(source, variables={"bos_token": special[0]}, tokens=special)
    user = {"role": "user", "content": question}
    messages = [user, {"role": "assistant", "content": "one"}, user, {"role": "assistant", "content": "two"}]
    segments = render(template, conversation({"messages": messages}))
    ids, trained = tokenise_ended(tokenizer, template, segments, tokenizer.stops)
    import tokenizers

    decode = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).decode
    spans: list[list[int]] = []
    for at, (id, wanted) in enumerate(zip(ids.tolist(), trained.tolist(), strict=True)):
        if wanted and (not at or not trained[at - 1]):
            spans.append([])
        if wanted:
            spans[-1].append(id)
    assert [decode(span, skip_special_tokens=False) for span in spans] == learned


RESULTS_INSIDE = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call>{% endfor %}"
    "{% for r in m.tool_responses or [] %}<result>{{ r.response }}</result>{% endfor %}"
    "{{ m.content }}<|end|>{% endfor %}" + PROMPT
)
SAME_BEGINNING = (  # a turn of the last assistant is not closed, and all headers begin with one token
    "{% for m in messages %}<|start|><|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|><|assistant|>{% endif %}"
)
EMPTY_THOUGHTS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}<think></think>{% endif %}"
    "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
THOUGHTS_OR_ANSWER = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}<answer>{% endif %}{{ m.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)


@pytest.mark.parametrize(
    ("source", "messages", "learned"),
    [
        (
            RESULTS_INSIDE,
            [USER, {**ANSWER, "tool_calls": [CALL], "tool_responses": [{"response": "3"}]}],
            ["<call>add</call>", "tell<|end|>"],
        ),
        (RESULTS_INSIDE, [USER, {**ANSWER, "tool_responses": [{"response": "3"}]}], ["tell<|end|>"]),
        (SAME_BEGINNING, [USER, ANSWER, USER, ANSWER], ["tell", "tell"]),
        (SAME_BEGINNING, [USER, ANSWER, ANSWER, USER, ANSWER], ["tell", "tell", "tell"]),
        (EMPTY_THOUGHTS, [USER, ANSWER, USER, ANSWER], ["</think>tell<|end|>"] * 2),
        (THOUGHTS_OR_ANSWER, [USER, ANSWER, USER, ANSWER], ["<answer>tell<|end|>"] * 2),
    ],
)
def test_neither_results_nor_headers_are_learned(
    source: str, messages: list[dict[str, Any]], learned: list[str]
) -> None:
    roles = ("<|start|>", "<|user|>", "<|assistant|>", "<|end|>")
    template = Template(source, tokens=[*roles, "<call>", "</call>", "<result>", "</result>", "<think>", "</think>"])
    found = render(template, conversation({"messages": messages}))
    assert [found.text[start:stop] for start, stop in found.learned] == learned


def test_results_that_change_more_than_themselves_are_refused() -> None:
    source = RESULTS_INSIDE.replace("<|end|>", "{% if m.tool_responses %}!{% endif %}<|end|>")
    with pytest.raises(
        ConfigError, match="writes more than what tools answered .* give it as messages of the role tool"
    ):
        render(Template(source), conversation({"messages": [USER, {**ANSWER, "tool_responses": [{"response": "3"}]}]}))


def test_chatml_writes_a_beginning_once(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    chat_model.write_tokenizer(tmp_path, None, chat_model.SPECIAL)
    file = tmp_path / "tokenizer_config.json"
    named = {**json.loads(file.read_text(encoding="utf-8")), "bos_token": "<|im_start|>"}
    file.write_text(json.dumps(named), encoding="utf-8")
    text, _ = open_template("chatml", tmp_path).render([USER])
    assert text == "<|im_start|>user\nask<|im_end|>\n"
