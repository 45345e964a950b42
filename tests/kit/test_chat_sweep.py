"""Which characters are learned, for every shape of template and every kind of conversation, against renderings by hand.

Each shape writes its conversation itself, with `«` and `»` around what is to be learned, or says why it can't be
written; the templates are rendered by the code under test.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from forge_train import ConfigError
from forge_train_kit.data.chats import Template, check_written, conversation, open_template, render

pytest.importorskip("jinja2")
pytestmark = pytest.mark.unit

Message = dict[str, Any]
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
TRIM = LLAMA3.replace("{{ m.content }}", "{{ m.content | trim }}")
STRICT = (
    "<bos>{% for m in messages if m.role != 'system' %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if m.role == 'user' %}[INST] "
    "{{ messages[0].content + '\n\n' if messages[0].role == 'system' and loop.first }}{{ m.content }} [/INST]"
    "{% else %} {{ m.content }}<eos>{% endif %}{% endfor %}"
)
TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    + HEADER
    + "<|im_start|>assistant\n{% endif %}"
)
HERMES = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<call>"
    "{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    + HEADER
    + "<|im_start|>assistant\n{% endif %}"
)
LISTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}{{ p.text }}{% endfor %}<|im_end|>\n"
    "{% endfor %}" + HEADER + "<|im_start|>assistant\n{% endif %}"
)
THINK = ["<think>", "</think>"]
IM = ["<|im_start|>", "<|im_end|>"]
COMMANDS = ["<bos>", "<|START|>", "<|STOP|>", "<|BOT|>", "<|SAY|>", "<|/SAY|>", "<|USER|>", "<|SYSTEM|>"]


@dataclass(frozen=True)
class Shape:
    """A template, and how a conversation is written in it: `%` is a content, `ROLE` a role, `«…»` is learned."""

    source: str
    tokens: list[str]
    turn: str
    assistant: str = ""
    """As `turn`, if the assistant's differs."""
    begin: str = ""
    end: str = ""
    writes: frozenset[str] = frozenset()
    """Of tools, calls and thoughts, what it writes."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    alternates: bool = False
    """Whether it refuses roles that do not alternate, and writes the system's text before the first question."""
    trims: bool = False

    def content(self, message: Message) -> str:
        content = message.get("content", "")
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        text = text.strip() if self.trims else text
        calls = message.get("tool_calls", ()) if "calls" in self.writes else ()
        return text + "".join(f'<call>{c["function"]["name"]} {{"x": 1}}</call>' for c in calls)

    def written(self, message: Message, *, last: bool) -> str:
        """A message. `last` is whether no user speaks after it."""
        role = message["role"]
        form = (self.assistant if role == "assistant" else "") or self.turn
        thoughts = message.get("reasoning_content", "")
        if role == "assistant" and self.source == NEMOTRON:
            opened = f"«\n{thoughts}\n</think>\n" if thoughts else "«</think>"
            form = f"<|im_start|>assistant\n<think>{opened}%<|im_end|>»\n".replace("«\n", "\n«")
        elif role == "assistant" and self.source == QWEN and last:
            empty = self.variables and not thoughts
            opened = "\n\n</think>\n\n«" if empty else f"\n«{thoughts}\n</think>\n\n"
            form = f"<|im_start|>assistant\n<think>{opened}%<|im_end|>»\n"
        on = role == "assistant" and all(message.get(name, 1) for name in ("weight", "train", "loss_mask"))
        form = form if on else re.sub("[«»]", "", form)
        name = role.upper() if self.source in (COMMAND, ALWAYS) else role
        return form.replace("ROLE", name).replace("%", self.content(message))

    def rendered(self, conversation: Sequence[Message], tools: Sequence[Any]) -> str:
        asked = max((at for at, one in enumerate(conversation) if one["role"] == "user"), default=-1)
        text = self.begin
        if tools and "tools" in self.writes:
            text += f"<|im_start|>tools\n{json.dumps(tools)}<|im_end|>\n"
        said = list(conversation)
        if self.alternates and said[0]["role"] == "system":
            said[:2] = [{**said[1], "content": f"{said[0]['content']}\n\n{said[1]['content']}"}]
            asked -= 1
        return text + "".join(self.written(one, last=at > asked) for at, one in enumerate(said)) + self.end

    def refusal(self, conversation: Sequence[Message], tools: Sequence[Any]) -> str:
        """What is said where the template can't write a conversation, else an empty string."""
        roles = [one["role"] for one in conversation if one["role"] != "system"]
        if self.alternates and roles != ["user", "assistant"] * (len(roles) // 2) + ["user"] * (len(roles) % 2):
            return "roles must alternate"
        if self.source == ALWAYS and conversation[0]["role"] == "assistant":
            return "begins and ends can't be told for sure"  # its prompt ends every text, and nothing is before a turn
        parts = ["tools"] if tools and "tools" not in self.writes else []
        for at, one in enumerate(conversation):
            if one.get("tool_calls") and "calls" not in self.writes:
                parts.append(rf"messages\[{at}\]\.tool_calls")
            if one.get("reasoning_content") and "thoughts" not in self.writes:
                parts.append(rf"messages\[{at}\]\.reasoning_content")
        return "leaves out " + ", ".join(parts) if parts else ""


IM_TURN = "<|im_start|>ROLE\n«%<|im_end|>»\n"
LLAMA_TURN = "<|h|>ROLE<|/h|>\n\n«%<|eot|>»"
LLAMA_TOKENS = ["<bos>", "<|h|>", "<|/h|>", "<|eot|>"]
PHI_TOKENS = ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<eos>"]
GLM_TOKENS = ["[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>"]
THOUGHTS = frozenset({"thoughts"})
SHAPES: dict[str, Shape] = {
    "chatml": Shape(CHATML, IM, IM_TURN),
    "llama3": Shape(LLAMA3, LLAMA_TOKENS, LLAMA_TURN, begin="<bos>"),
    "trim": Shape(TRIM, LLAMA_TOKENS, LLAMA_TURN, begin="<bos>", trims=True),
    "phi3": Shape(PHI3, PHI_TOKENS, "<|ROLE|>\n«%<|end|>»\n", end="<eos>"),
    "gemma": Shape(
        GEMMA, ["<bos>", "<turn>", "</turn>"], "<turn>ROLE\n%</turn>\n", "<turn>model\n«%</turn>»\n", begin="<bos>"
    ),
    "glm": Shape(GLM, GLM_TOKENS, "<|ROLE|>\n«%»", begin="[gMASK]<sop>"),
    "command": Shape(
        COMMAND, COMMANDS, "<|START|><|ROLE|>%<|STOP|>", "<|START|><|BOT|>«<|SAY|>%<|/SAY|><|STOP|>»", begin="<bos>"
    ),
    "always": Shape(
        ALWAYS,
        COMMANDS,
        "<|START|><|ROLE|>%<|STOP|>",
        "<|START|><|BOT|>«<|SAY|>%<|/SAY|><|STOP|>»",
        begin="<bos>",
        end="<|START|><|BOT|>",
    ),
    "nemotron": Shape(NEMOTRON, IM + THINK, IM_TURN, writes=THOUGHTS),
    "qwen": Shape(QWEN, IM + THINK, IM_TURN, writes=THOUGHTS),
    "qwen, no thinking": Shape(QWEN, IM + THINK, IM_TURN, writes=THOUGHTS, variables={"enable_thinking": False}),
    "gpt2": Shape(GPT2, ["<eos>"], "ROLE: %\n", "assistant: «%<eos>»\n", begin="<eos>"),
    "strict": Shape(STRICT, ["<bos>", "<eos>"], "[INST] % [/INST]", "« %<eos>»", begin="<bos>", alternates=True),
    "tagged": Shape(TAGGED, IM, IM_TURN),
    "hermes": Shape(HERMES, [*IM, "<call>", "</call>"], IM_TURN, writes=frozenset({"tools", "calls"})),
    "lists": Shape(LISTS, IM, IM_TURN),
}


def u(text: str | list[Any]) -> Message:
    return {"role": "user", "content": text}


def a(text: str | list[Any], **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


S = {"role": "system", "content": "Be kind."}
CALL = {"type": "function", "id": "1", "function": {"name": "add", "arguments": {"x": 1}}}
FOUND = {"role": "tool", "tool_call_id": "1", "content": "two"}
CONVERSATIONS: dict[str, list[Message]] = {
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
    "headers": [u("<|im_start|>assistant\nassistant: <|assistant|>\n[/INST] <turn>model\nx"), a("tell")],
    "role names": [u("assistant"), a("user"), u("model"), a("assistant")],
    "spaces": [u(" ask\n"), a("  tell \n"), u("more"), a("\n\nagain")],
    "inside": [u("tell me"), a("me"), u("tell"), a("tell me")],
    "parts": [
        u([{"type": "text", "text": "as"}, {"type": "text", "text": "k"}]),
        a([{"type": "text", "text": "tell"}]),
    ],
    "developer": [{"role": "developer", "content": "Be brief."}, u("ask"), a("tell")],
    "thoughts": [u("ask"), a("tell", reasoning_content="why")],
    "thoughts twice": [u("ask"), a("tell", reasoning_content="why"), u("more"), a("last", reasoning_content="how")],
    "call": [u("ask"), a("", tool_calls=[CALL]), FOUND, a("three")],
    "call beside text": [u("ask"), a("Adding:", tool_calls=[CALL]), FOUND, a("three")],
    "tool": [u("ask"), FOUND, a("three")],
    "tools": [u("ask"), a("tell")],
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def learned(
    source: str, tokens: list[str], messages: Sequence[Message], tools: Sequence[Any] = (), variables: Any = None
) -> str:
    """The rendering with `«` and `»` around what is learned, if nothing of the record is left out."""
    template = Template(source, tokens=tokens, variables=variables)
    record = conversation({"messages": messages, "tools": list(tools)}, "here")
    found = render(template, record)
    text = found.text
    check_written(template, record, text)
    for start, stop in reversed(found.learned):
        text = f"{text[:start]}«{text[start:stop]}»{text[stop:]}"
    return text


@pytest.mark.parametrize("kind", CONVERSATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_exactly_what_the_assistant_says_is_learned(shape: str, kind: str) -> None:
    """Every shape with every kind: as written here, or refused for the reason that is given here."""
    form, messages = SHAPES[shape], CONVERSATIONS[kind]
    tools = TOOLS if kind == "tools" else []
    if refusal := form.refusal(messages, tools):
        with pytest.raises(ConfigError, match=f"^here: .*{refusal}"):
            learned(form.source, form.tokens, messages, tools, form.variables)
        return
    assert learned(form.source, form.tokens, messages, tools, form.variables) == form.rendered(messages, tools)


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
        assert learned(source, IM + THINK, messages, variables=variables) == ask + expected
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
    calls: list[Any] = [
        {"type": "function", "id": name, "function": {"name": name, "arguments": {}}} for name in ("add", "sub")
    ]
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
