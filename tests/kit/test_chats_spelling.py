"""Misspelt keys of messages and records, and keys of the data's own."""

from __future__ import annotations

from typing import Any

import pytest

from forge_train import ConfigError
from forge_train_kit.data.chats import conversation, embedding_texts, preference

pytestmark = [pytest.mark.unit]

USER = {"role": "user", "content": "a"}
ASSISTANT = {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("weights", "weight"),
        ("wieght", "weight"),
        ("weigth", "weight"),
        ("wight", "weight"),
        ("Weight", "weight"),
        ("trian", "train"),
        ("traning", "training"),
        ("lossmask", "loss_mask"),
        ("loss-mask", "loss_mask"),
        ("los_mask", "loss_mask"),
        ("tool_call", "tool_calls"),
        ("toolCalls", "tool_calls"),
        ("resoning", "reasoning"),
        ("reasoning_contents", "reasoning_content"),
    ],
)
def test_a_slip_in_a_message_is_refused(slip: str, meant: str) -> None:
    for record in (
        {"messages": [USER, {**ASSISTANT, slip: 0}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", slip: 0}]},
        {"prompt": "a", "completion": [{**ASSISTANT, slip: 0}]},
    ):
        with pytest.raises(ConfigError, match=rf"^here: .*\[\d\]: '{slip}' is not read. Did you mean '{meant}'\?"):
            conversation(record, "here")


def test_a_message_without_its_role_or_content_names_the_slip() -> None:
    with pytest.raises(ConfigError, match=r"messages\[0\]: 'roel' is not read. Did you mean 'role'\?"):
        conversation({"messages": [{"roel": "user", "content": "a"}, ASSISTANT]})
    with pytest.raises(ConfigError, match=r"messages\[1\]: 'contnet' is not read. Did you mean 'content'\?"):
        conversation({"messages": [USER, {"role": "assistant", "contnet": "b"}]})


OWN = ("id", "name", "timestamp", "context", "contents", "trait", "height", "rating", "roles", "rule", "tool_name",
       "weighted", "trained", "is_train", "think", "loss", "value", "model", "date")  # fmt: skip


def test_keys_of_the_data_s_own_pass() -> None:
    own: dict[str, Any] = dict.fromkeys(OWN, "x")
    found = conversation({"messages": [{**USER, **own}, {**ASSISTANT, **own}], **own, "tool": "calculator"})
    assert found.messages[1] == {**ASSISTANT, **own}
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": {"argument": 1, "functions": 2}}}
    found = conversation({"messages": [USER, {"role": "assistant", "tool_calls": [call], "context": "x"}]})
    assert found.messages[1]["tool_calls"] == [call]


def test_a_slip_that_is_null_or_beside_what_it_means_passes() -> None:
    found = conversation({"messages": [USER, {**ASSISTANT, "weights": None, "weight": 0.5, "weigth": 3}]})
    assert found.messages[1]["weight"] == 0.5


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"messages": [USER, ASSISTANT], "sytem": "s"}, "'sytem' is not read. Did you mean 'system'"),
        ({"messages": [USER, ASSISTANT], "toosl": [{"name": "f"}]}, "'toosl' is not read. Did you mean 'tools'"),
        ({"mesages": [USER, ASSISTANT]}, "'mesages' is not read. Did you mean 'messages'"),
        ({"promt": "a", "completion": "b"}, "'promt' is not read. Did you mean 'prompt'"),
        ({"instruction": "a", "output": "b", "inputs": "c"}, "'inputs' is not read. Did you mean 'input'"),
        ({"instruction": "a", "output": "b", "histroy": [["c", "d"]]}, "'histroy' is not read. Did you mean 'history'"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "argument": {"x": 1}}}]}]},
         r"tool_calls\[0\]\.function: 'argument' is not read. Did you mean 'arguments'"),
    ],
)  # fmt: skip
def test_a_slip_in_a_record_or_a_call_is_refused(record: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"^here: .*{says}|^here: {says}"):
        conversation(record, "here")


def test_a_slip_in_a_pair_is_refused() -> None:
    answers = {"chosen": [USER, ASSISTANT], "rejected": [USER, {**ASSISTANT, "content": "c"}]}
    with pytest.raises(ConfigError, match="^here: 'promt' is not read. Did you mean 'prompt'"):
        preference({**answers, "promt": "x"}, "here")
    with pytest.raises(ConfigError, match="^here: 'choosen' is not read. Did you mean 'chosen'"):
        preference({"prompt": "x", "choosen": "a", "rejected": "b"}, "here")
    with pytest.raises(ConfigError, match="^here: 'negatives' is not read. Did you mean 'negative'"):
        embedding_texts({"anchor": "a", "positive": "b", "negatives": ["c"]}, "here")
