"""Records to conversations, and to pairs."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from forge_train import ConfigError
from forge_train_kit.data.chats import (
    EmbeddingTexts,
    Template,
    conversation,
    embedding_texts,
    open_template,
    preference,
    renamed,
    render_preference,
)

pytest.importorskip("jinja2")
pytestmark = [pytest.mark.unit]

USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
SAID = {"from": "human", "value": "a"}
TOOL = {"type": "function", "function": {"name": "add"}}
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}]}


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"messages": [USER, ASSISTANT], "source": "x"}, [USER, ASSISTANT]),
        ({"messages": [USER, {**CALL, "content": None}], "prompt": None}, [USER, CALL]),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": part} for part in "ab"]}, ASSISTANT]},
            [{"role": "user", "content": "ab"}, ASSISTANT],
        ),
        ({"conversations": [SAID, {"from": "gpt", "value": "b"}]}, [USER, ASSISTANT]),
        (
            {"system": "s", "conversations": [SAID, {"from": "gpt", "value": "b", "weight": 0}]},
            [{"role": "system", "content": "s"}, USER, {**ASSISTANT, "weight": 0}],
        ),
        ({"prompt": "a", "completion": "b"}, [USER, ASSISTANT]),
        ({"prompt": [USER], "completion": [ASSISTANT]}, [USER, ASSISTANT]),
        ({"instruction": "a", "input": "", "output": "b"}, [USER, ASSISTANT]),
        ({"instruction": "x", "input": "y", "output": "b"}, [{"role": "user", "content": "x\n\ny"}, ASSISTANT]),
        ({"instruction": "a", "output": "b", "history": [["a", "b"]]}, [USER, ASSISTANT, USER, ASSISTANT]),
    ],
)  # fmt: skip
def test_reads_the_usual_shapes(record: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    assert list(conversation(record).messages) == messages


@pytest.mark.parametrize(
    ("record", "rename", "roles"),
    [
        ({"question": "a", "answer": "b"}, {"prompt": "question", "completion": "answer"}, {}),
        ({"row": {"q": "a", "a": "b"}, "n": 1}, {"instruction": "row.q", "output": "row.a"}, {}),
        ({"dialog": [{"who": "me", "text": "a"}, {"who": "bot", "text": "b"}]},
         {"messages": "dialog", "role": "who", "content": "text"}, {"me": "user", "bot": "assistant"}),
        ({"messages": json.dumps([{"from": "human", "value": "a"}, {"from": "bot", "value": "b"}])},
         {}, {"bot": "gpt"}),
    ],
)  # fmt: skip
def test_fields_and_roles_may_have_other_names(
    record: dict[str, Any], rename: dict[str, str], roles: dict[str, str]
) -> None:
    assert list(conversation(renamed(record, rename, roles, "line 1")).messages) == [USER, ASSISTANT]


def test_tools_may_be_json_in_a_string() -> None:
    for tools in ([TOOL], json.dumps([TOOL])):
        assert conversation({"messages": [USER, ASSISTANT], "tools": tools}).tools == (TOOL,)
    assert conversation({"messages": [USER, ASSISTANT], "tools": ""}).tools == ()


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({"text": "a", "id": 1}, r"\(text, id\) are no conversation's\. Shapes that are read: messages; conversat"),
        ({}, r"fields \(none\)"),
        ({"messages": [USER, ASSISTANT], "prompt": "a", "completion": "b"}, "more than one shape of records: messages"),
        ({"messages": []}, "conversation is empty"),
        ({"messages": [USER]}, "no turn of the assistant to learn; the roles are user"),
        ({"prompt": [USER, ASSISTANT], "completion": [USER]}, "no turn of the assistant"),
        ({"messages": "hi"}, "messages: expected a list of messages, found str"),
        ({"messages": ["hi"]}, r"messages\[0\]: expected a message with role and content, found str"),
        ({"messages": [{"role": "asistant", "content": "b"}]}, r"'asistant'; expected .* Did you mean 'assistant'\?"),
        ({"messages": [{"role": "user"}, ASSISTANT]}, r"messages\[0\]: the message has no content"),
        ({"messages": [{"role": "user", "content": 3}, ASSISTANT]}, "expected a string, found int"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, ASSISTANT]}, "type 'image'; only text"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": "add"}]}, "tool_calls: expected a list of calls"),
        ({"messages": [USER, {**ASSISTANT, "train": 0.5}]}, r"train is 0\.5; expected 0 \(not learned\) or 1"),
        ({"messages": [USER, {**ASSISTANT, "weight": -1}]}, r"weight is -1; expected 0 .* or a weight from 1e-06 to"),
        ({"messages": [USER, {**ASSISTANT, "weight": float("nan")}]}, "weight is nan; expected 0"),
        ({"messages": [USER, {**ASSISTANT, "weight": "0.5"}]}, "weight is '0.5'; expected 0"),
        ({"messages": [{**USER, "weight": 0.5}, ASSISTANT]}, r"messages\[0\]: weight is 0\.5, and the role is user"),
        ({"prompt": [USER, {**ASSISTANT, "weight": 2}, USER], "completion": "b"},
         r"prompt\[1\]: weight is 2, but a prompt is not learned"),
        ({"conversations": [{"from": "bob", "value": "a"}]}, "from is 'bob'; expected one of human, gpt"),
        ({"prompt": "a", "completion": "b", "label": "False"}, "label is false: an answer that was judged bad"),
        ({"prompt": "a", "completion": "b", "label": False}, "label is false: an answer that was judged bad"),
        ({"conversations": [{"text": "a"}]}, "expected from and value, found text"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]},
         r"tool_calls\[0\]\.function\.arguments: expected a JSON object"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "a"}}]}]},
         r"arguments: no JSON"),
        ({"instruction": 1, "output": "b"}, "instruction: expected a string, found int"),
        ({"instruction": "a", "output": "b", "history": ["a"]}, "history: expected pairs"),
        ({"messages": [USER, ASSISTANT], "tools": "{"}, "tools: no JSON"),
        ({"messages": [USER, ASSISTANT], "tools": ["add"]}, "tools: expected a list of JSON schemas"),
    ],
)  # fmt: skip
def test_says_what_is_wrong_with_a_record_and_where_it_is(record: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=rf"^chats\.jsonl, line 7.*{sentence}"):
        conversation(record, "chats.jsonl, line 7")


WORSE = {"role": "assistant", "content": "c"}
TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(("record", "context"), [({"messages": TURNS}, 0), ({"prompt": "a", "completion": "b"}, 2)])
def test_a_system_prompt_beside_the_messages_is_read(record: dict[str, Any], context: int) -> None:
    found = conversation({"system": "Be kind.", **record})
    assert [message["content"] for message in found.messages] == ["Be kind.", "a", "b"]
    assert found.context == context
    assert [found.messages[at]["content"] for at in found.learned] == ["b"]
    with pytest.raises(ConfigError, match=r"^here: one system prompt is beside the messages and another among them"):
        conversation({"system": "Be kind.", "messages": [{"role": "system", "content": "No."}, *TURNS]}, "here")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"functions": [{"name": "f"}]}, "functions is not read: name it tools, or leave it out."),
        ({"images": ["a.png"]}, "images is not read: enable a plugin that reads them beside text"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs is not read: template_options"),
        ({"weight": 0}, "weight of a whole record is not read: give it to messages"),
        ({"train": False}, "train of a whole record is not read"),
        ({"weight": "0.5"}, "weight of a whole record is not read"),
        ({"training": " False"}, "training of a whole record is not read"),
        ({"loss_mask": [0, 1]}, "loss_mask of a whole record is not read"),
        ({"loss_mask": "[0, 1]"}, "loss_mask of a whole record is not read"),
        ({"functions": '[{"name": "f"}]'}, "functions is not read"),
    ],
)
def test_what_stands_beside_the_messages_is_not_ignored(more: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"^here: {says}"):
        conversation({"messages": TURNS, **more}, "here")
    empty = {"functions": [], "images": None, "chat_template_kwargs": {"tools": None, "prompt": ""}, "weight": 1.0}
    assert len(conversation({"messages": TURNS, **empty, "train": "yes"}).messages) == 2
    table = {"functions": "[]", "images": "", "chat_template_kwargs": "{}", "weight": "1.0", "loss_mask": "True"}
    assert len(conversation({"messages": TURNS, **table, "train": "", "training": "set A"}).messages) == 2
    for pair in ({"prompt": "a", "chosen": "b", "rejected": "c"}, {"chosen": TURNS, "rejected": [USER, WORSE]}):
        with pytest.raises(ConfigError, match=f"^here: {says}"):
            preference({**pair, **more}, "here")
        preference({**pair, **table, "prompt": pair.get("prompt", "")})


def test_a_pair_has_a_system_prompt_too() -> None:
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    found = preference({**pair, "system": "Be kind."})
    for one in (found.chosen, found.rejected):
        assert [message["role"] for message in one.messages] == ["system", "user", "assistant"]
        assert one.context == 2
    with pytest.raises(ConfigError, match="^here: one system prompt is beside the messages"):
        preference({**pair, "prompt": [{"role": "system", "content": "No."}, USER], "system": "Be kind."}, "here")


def test_texts_that_belong_together_are_alike_from_tables() -> None:
    pair = {"anchor": "a", "positive": "b"}
    assert embedding_texts({**pair, "negative": None}) == embedding_texts({**pair, "negative": ""})
    assert embedding_texts({**pair, "negative": ["c"]}) == embedding_texts({**pair, "negative": '["c"]'})
    with pytest.raises(ConfigError, match="^here: weight of a whole record is not read"):
        embedding_texts({**pair, "weight": "0.5"}, "here")


def test_takes_the_shape_that_is_chosen() -> None:
    record = {"messages": [USER, ASSISTANT], "prompt": "c", "completion": "d"}
    assert conversation(record, shape="prompt").messages[0]["content"] == "c"
    with pytest.raises(ConfigError, match="no shape of records 'promt'; .* Did you mean 'prompt'"):
        conversation(record, shape="promt")


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [WORSE]},
        {"prompt": "a", "chosen": [USER, ASSISTANT], "rejected": [USER, WORSE]},
        {"prompt": None, "chosen": [USER, ASSISTANT], "rejected": [USER, WORSE], "score": 1},
        {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"},
    ],
)
def test_preference_pairs_have_a_common_prompt(record: dict[str, Any]) -> None:
    chosen, rejected = render_preference(open_template("plain"), preference(record))
    assert (chosen.text, chosen.learned) == ("User: a\n\nAssistant: b\n\n", ((19, 23),))
    assert (rejected.text, rejected.learned) == ("User: a\n\nAssistant: c\n\n", ((19, 23),))


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({"prompt": "a", "completion": "b", "label": True}, "prompt, completion and label are one answer"),
        ({"chosen": "b"}, "expected chosen and rejected; the fields are chosen"),
        ({"chosen": "b", "rejected": "c"}, "chosen is a string, and there is no prompt"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same"),
        ({"chosen": [USER, ASSISTANT], "rejected": [USER]}, "there is no turn of the assistant"),
    ],
)
def test_says_what_is_wrong_with_a_pair(record: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"^row 2: {re.escape(sentence)}"):
        preference(record, "row 2")


def test_a_prompt_that_depends_on_the_answer_is_refused() -> None:
    source = (
        "{{ messages[-1].content[0] }}{% for m in messages if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% endfor %}"
    )
    with pytest.raises(ConfigError, match="row 2: .* does not write the same prompt before both"):
        render_preference(Template(source), preference({"prompt": "a", "chosen": "b", "rejected": "c"}, "row 2"))


def test_embedding_texts() -> None:
    assert embedding_texts({"anchor": "a", "positive": "b"}) == EmbeddingTexts("a", "b")
    assert embedding_texts({"anchor": "a", "positive": "b", "negative": "c"}) == EmbeddingTexts("a", "b", ("c",))
    assert embedding_texts({"anchor": "a", "positive": "b", "negative": ["c", "d"]}).negatives == ("c", "d")
    for record, sentence in (
        ({"anchor": "a"}, "row 2: expected a text as positive; the fields are anchor"),
        ({"anchor": "a", "positive": "b", "negative": [1]}, "row 2: negative: expected a text, or a list"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            embedding_texts(record, "row 2")
