"""Which part of a rendering is a turn of the assistant, for templates of all manners."""

from __future__ import annotations

from typing import Any

import pytest

from forge_train import ConfigError
from forge_train_kit.data.chats import Template, conversation, open_template, render

pytest.importorskip("jinja2")
pytestmark = [pytest.mark.unit]

USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}]}
FOUR = {"messages": [USER, ASSISTANT, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]}


def test_context_and_weights_are_not_learned() -> None:
    def spans(record: dict[str, Any], learn: Any = "assistant", source: str | None = None) -> list[str]:
        template = open_template("plain") if source is None else Template(source)
        segments = render(template, conversation(record), learn=learn)
        return [segments.text[start:stop] for start, stop in segments.learned]

    messages = FOUR["messages"]
    shots = {"prompt": messages[:3], "completion": messages[3:]}
    light = {"messages": [USER, {**ASSISTANT, "weight": 0}, *messages[2:]]}
    dark = {"messages": [*messages[:3], {**messages[3], "weight": 0}]}
    tagged = (
        "{% for m in messages %}{% generation %}{% if m.role == 'assistant' %}{{ m.content }}{% endif %}"
        "{% endgeneration %}{% endfor %}"
    )
    for source, b, d in ((None, " b\n\n", " d\n\n"), (tagged, "b", "d")):
        assert spans(FOUR, source=source) == [b, d]
        assert spans(shots, source=source) == spans(light, source=source) == [d]
        assert spans(dark, source=source) == spans(dark, "last", source) == [b]


def test_tags_may_be_several_in_a_turn() -> None:
    source = (
        "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}-{% generation %}.{% endgeneration %}{% else %}{{ m.content }}{% endif %}|{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    found = render(Template(source), conversation(FOUR))
    assert [found.text[a:b] for a, b in found.learned] == ["b", ".", "d", "."]
    found = render(Template(source), conversation(FOUR), learn="last")
    assert [found.text[a:b] for a, b in found.learned] == ["d", "."]


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.role }}: {{ m.content | upper }}\n{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ m.content }}\n{% endfor %}",
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}?{% endif %}",
        "{% for m in messages %}{{ m.content }}{{ m.content | length }}\n{% endfor %}",
    ],
)
def test_refuses_where_the_turns_are_not_sure(source: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^row 3: .* the assistant's message 1, .* can't be told for sure; put {% gen"
    ):
        render(Template(source), conversation(FOUR, "row 3"))


def test_learns_a_call_whose_words_and_arguments_are_not_written() -> None:
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.tool_calls[0].function.name if m.tool_calls else m.content }}</>\n"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    messages = [USER, {**CALL, "content": "Well:"}, {"role": "tool", "content": "3"}, ASSISTANT]
    found = render(Template(source, tokens=["</>"]), conversation({"messages": messages}))
    assert [found.text[a:b] for a, b in found.learned] == ["add</>", "b</>"]


@pytest.mark.parametrize(
    ("end", "last", "learned"),
    [
        ("<|end|>", "<|return|>", ["b<|end|>", "d<|return|>"]),
        ("<|end|>\n", "<|end|>\n<|return|>", ["b<|end|>", "d<|end|>"]),
        ("", "", ["b", "d"]),
        ("", "<|return|>", ["b", "d<|return|>"]),
    ],
)
def test_a_last_turn_may_end_otherwise(end: str, last: str, learned: list[str]) -> None:
    source = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
        "{{ last if loop.last and not add_generation_prompt else end }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokens = ["<|user|>", "<|assistant|>", "<|end|>", "<|return|>"]
    found = render(Template(source, tokens=tokens, variables={"end": end, "last": last}), conversation(FOUR))
    assert [found.text[a:b] for a, b in found.learned] == learned


def test_learns_nothing_of_a_turn_that_is_left_out() -> None:
    source = (
        "{% for m in messages[-2:] %}<{{ m.role }}>{{ m.content }}</>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    found = render(Template(source, tokens=["</>"]), conversation(FOUR))
    assert [found.text[a:b] for a, b in found.learned] == ["d</>"]
