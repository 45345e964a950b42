"""Which characters are learned, for shapes of templates and kinds of conversations, against renderings by hand.

Each shape writes its conversation itself, with `«` and `»` around what is to be learned; the templates are rendered by
the code under test.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from forge_train_kit.data.chats import Template, conversation, open_template, render

pytest.importorskip("jinja2")
pytestmark = pytest.mark.unit

HEADER = "{% if add_generation_prompt %}"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    + HEADER
    + "<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "<bos>{% for m in messages %}<|h|>{{ m.role }}<|/h|>\n\n{{ m.content }}<|eot|>{% endfor %}"
    + HEADER
    + "<|h|>assistant<|/h|>\n\n{% endif %}"
)
PHI3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    + HEADER
    + "<|assistant|>\n{% else %}<eos>{% endif %}"
)
GEMMA = (
    "<bos>{% for m in messages %}<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}</turn>\n"
    "{% endfor %}" + HEADER + "<turn>model\n{% endif %}"
)
GLM = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    + HEADER
    + "<|assistant|>\n{% endif %}"
)
COMMAND = (
    "<bos>{% for m in messages %}<|START|>{% if m.role == 'assistant' %}<|BOT|><|SAY|>{{ m.content }}<|/SAY|>"
    "{% else %}<|{{ m.role | upper }}|>{{ m.content }}{% endif %}<|STOP|>{% endfor %}"
    + HEADER
    + "<|START|><|BOT|>{% endif %}"
)
ALWAYS = COMMAND.replace(HEADER, "{% if messages[-1].role != 'x' %}")
NEMOTRON = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% if m.reasoning_content %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n{% else %}<think></think>{% endif %}{% endif %}{{ m.content }}"
    "<|im_end|>\n{% endfor %}" + HEADER + "<|im_start|>assistant\n<think>\n{% endif %}"
)
QWEN = (
    "{% set ns = namespace(asked=-1) %}{% for m in messages if m.role == 'user' %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.index0 > ns.asked %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    + HEADER
    + "<|im_start|>assistant\n{{ '<think>\n\n</think>\n\n' if enable_thinking is false else '<think>\n' }}{% endif %}"
)
GPT2 = (
    "<eos>{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '<eos>' if m.role == 'assistant' }}\n{% endfor %}"
    + HEADER
    + "assistant: {% endif %}"
)
THINK = ["<think>", "</think>"]
IM = ["<|im_start|>", "<|im_end|>"]
COMMANDS = ["<bos>", "<|START|>", "<|STOP|>", "<|BOT|>", "<|SAY|>", "<|/SAY|>", "<|USER|>", "<|SYSTEM|>"]

Writer = Mapping[str, str]
"""By role, how a message is written: `%` is its content."""
SHAPES: dict[str, tuple[str, list[str], tuple[str, Writer, str]]] = {
    "chatml": (CHATML, IM, ("", {"*": "<|im_start|>ROLE\n«%<|im_end|>»\n"}, "")),
    "llama3": (LLAMA3, ["<bos>", "<|h|>", "<|/h|>", "<|eot|>"], ("<bos>", {"*": "<|h|>ROLE<|/h|>\n\n«%<|eot|>»"}, "")),
    "phi3": (
        PHI3,
        ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<eos>"],
        ("", {"*": "<|ROLE|>\n«%<|end|>»\n"}, "<eos>"),
    ),
    "gemma": (
        GEMMA,
        ["<bos>", "<turn>", "</turn>"],
        ("<bos>", {"*": "<turn>ROLE\n«%</turn>»\n", "assistant": "<turn>model\n«%</turn>»\n"}, ""),
    ),
    "glm": (
        GLM,
        ["[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>"],
        ("[gMASK]<sop>", {"*": "<|ROLE|>\n«%»"}, ""),
    ),
    "command": (
        COMMAND,
        COMMANDS,
        (
            "<bos>",
            {
                "user": "<|START|><|USER|>«%»<|STOP|>",
                "system": "<|START|><|SYSTEM|>«%»<|STOP|>",
                "assistant": "<|START|><|BOT|>«<|SAY|>%<|/SAY|><|STOP|>»",
            },
            "",
        ),
    ),
    "nemotron": (
        NEMOTRON,
        IM + THINK,
        (
            "",
            {"*": "<|im_start|>ROLE\n«%<|im_end|>»\n",
             "assistant": "<|im_start|>assistant\n<think>«</think>%<|im_end|>»\n"},
            "",
        ),
    ),
    "gpt2": (GPT2, ["<eos>"], ("<eos>", {"*": "ROLE: «%»\n", "assistant": "assistant: «%<eos>»\n"}, "")),
}  # fmt: skip


def u(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def a(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


S = {"role": "system", "content": "Be kind."}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "plain": [u("ask"), a("tell")],
    "system": [S, u("ask"), a("tell")],
    "turns": [u("ask"), a("tell"), u("more"), a("again")],
    "equal": [u("same"), a("same"), u("same"), a("same")],
    "consecutive": [u("ask"), a("tell"), a("more"), u("and"), a("last")],
    "first": [S, a("hello"), u("ask"), a("tell")],
    "opens": [a("hello"), u("ask"), a("tell")],
    "user-last": [u("ask"), a("tell"), u("more")],
    "weight": [u("ask"), a("wrong", weight=0), u("more"), a("right")],
    "train": [u("ask"), a("right"), u("more"), a("wrong", train=False)],
    "loss_mask": [u("ask"), a("wrong", loss_mask=0), u("more"), a("right", loss_mask=1)],
    "stops": [u("<|im_end|></turn><eos><|STOP|><|end|><|eot|>"), a("tell"), u("</s>"), a("again")],
}


def learned(source: str, tokens: list[str], messages: list[dict[str, Any]], **variables: Any) -> str:
    """The rendering with `«` and `»` around what is learned."""
    found = render(Template(source, tokens=tokens, variables=variables), conversation({"messages": messages}))
    text = found.text
    for start, stop in reversed(found.learned):
        text = f"{text[:start]}«{text[start:stop]}»{text[stop:]}"
    return text


@pytest.mark.parametrize("kind", CONVERSATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_exactly_what_the_assistant_says_is_learned(shape: str, kind: str) -> None:
    source, tokens, (begin, writer, end) = SHAPES[shape]
    expected = begin
    for message in CONVERSATIONS[kind]:
        role = message["role"]
        on = role == "assistant" and all(message.get(name, 1) for name in ("weight", "train", "loss_mask"))
        written = writer.get(role, writer.get("*", "")).replace("ROLE", role)
        expected += (written if on else re.sub("[«»]", "", written)).replace("%", message["content"])
    assert learned(source, tokens, CONVERSATIONS[kind]) == expected + end


def test_a_prompt_at_the_end_of_every_text_is_not_learned() -> None:
    expected = "<bos><|START|><|USER|>ask<|STOP|><|START|><|BOT|>«<|SAY|>tell<|/SAY|><|STOP|>»<|START|><|BOT|>"
    assert learned(ALWAYS, COMMANDS, CONVERSATIONS["plain"]) == expected


def test_thoughts() -> None:
    why = a("tell", reasoning_content="why")
    ask = "<|im_start|>user\nask<|im_end|>\n<|im_start|>assistant\n"
    plain = [u("ask"), a("tell")]
    for source, variables, messages, expected in (
        (NEMOTRON, {}, [u("ask"), why], "<think>\n«why\n</think>\ntell<|im_end|>»\n"),
        (QWEN, {}, [u("ask"), why], "<think>\n«why\n</think>\n\ntell<|im_end|>»\n"),
        (QWEN, {"enable_thinking": False}, plain, "<think>\n\n</think>\n\n«tell<|im_end|>»\n"),
        (QWEN, {"enable_thinking": False}, [u("ask"), why], "<think>\n«why\n</think>\n\ntell<|im_end|>»\n"),
    ):
        assert learned(source, IM + THINK, messages, **variables) == ask + expected
    assert learned(QWEN, IM + THINK, [a("hello"), u("ask"), why]) == (
        f"<|im_start|>assistant\n«hello<|im_end|>»\n{ask}<think>\n«why\n</think>\n\ntell<|im_end|>»\n"
    )


CALLS_INSIDE = (
    "{% for m in messages if m.role != 'tool' %}<|turn>{{ m.role }}\n{% for c in m.tool_calls or [] %}"
    "<|call>{{ c.function.name }}<call|>{% for t in messages if t.role == 'tool' and t.tool_call_id == c.id %}"
    "<|result>{{ t.content }}<result|>{% endfor %}{% endfor %}{{ m.content }}<turn|>\n{% endfor %}"
    + HEADER
    + "<|turn>assistant\n{% endif %}"
)


def test_outputs_of_tools_inside_a_turn_are_not_learned() -> None:
    tokens = ["<|turn>", "<turn|>", "<|call>", "<call|>", "<|result>", "<result|>"]
    calls = [{"type": "function", "id": name, "function": {"name": name, "arguments": {}}} for name in ("add", "sub")]
    results = [{"role": "tool", "tool_call_id": name, "content": f"of {name}"} for name in ("add", "sub")]
    begin = "<|turn>user\nask<turn|>\n<|turn>assistant\n"
    add, sub = "«<|call>add<call|>»<|result>of add<result|>", "«<|call>sub<call|>»<|result>of sub<result|>"
    one = [u("ask"), a("So:", tool_calls=calls[:1]), results[0]]
    two = [u("ask"), a("So:", tool_calls=calls), *results]
    end = "«So:<turn|>»\n"
    assert learned(CALLS_INSIDE, tokens, one) == begin + add + end
    assert learned(CALLS_INSIDE, tokens, two) == begin + add + sub + end
    assert learned(CALLS_INSIDE, tokens, [*two, u("more"), a("last")]) == (
        f"{begin}{add}{sub}{end}<|turn>user\nmore<turn|>\n<|turn>assistant\n«last<turn|>»\n"
    )


def test_chatml_writes_a_beginning_that_is_its_header_once(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"content": token} for token in IM]}))
    for bos, begin in (("<|im_start|>", ""), ("<s>", "<s>")):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": bos}))
        text = render(open_template("chatml", tmp_path), conversation({"messages": CONVERSATIONS["plain"]})).text
        assert text == begin + "<|im_start|>user\nask<|im_end|>\n<|im_start|>assistant\ntell<|im_end|>\n"
