"""Masks and ids of chats are those of transformers, which is told by `{% generation %}` what we have to find."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from chat_families import FAMILIES, names, tokenizer, untagged
from forge_train import ConfigError
from forge_train_kit.data.chats import (
    Conversation,
    Template,
    conversation,
    open_template,
    render,
    tokenise,
    tokenise_ended,
    turn_end,
)
from forge_train_kit.data.tokenizers.pretrained import PretrainedTokenizer

transformers = pytest.importorskip("transformers")
pytest.importorskip("jinja2")
pytestmark = [pytest.mark.unit]

DATE = {"date_string": "26 Jul 2024"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Hugging Face folder of each family, with the template as its publisher has it."""
    root = tmp_path_factory.mktemp("families")
    for family, (template, bos, eos) in FAMILIES.items():
        folder = root / family
        folder.mkdir()
        tokenizer().save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **names(bos, eos), "chat_template": untagged(template)}
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return {family: root / family for family in FAMILIES}


class Pair:
    """Ours and transformers' of one family."""

    def __init__(self, folder: Path, family: str) -> None:
        self.tagged, *_ = FAMILIES[family]
        self.template: Template = open_template("", folder, variables=DATE)
        self.ours, self.theirs = PretrainedTokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)

    def agree(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[str]:
        """The learned spans, after ids and mask were compared.

        Transformers also marks a token that begins before the span and ends in it; we do not, so it is taken out.
        """
        found = conversation({"messages": messages, "tools": tools})
        segments = render(self.template, found)
        ids, trained = tokenise(self.ours, segments)
        options = {"chat_template": self.tagged, "tools": tools, **DATE}
        theirs = self.theirs.apply_chat_template(
            messages,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_offsets_mapping": True},
            **options,
        )
        assert self.theirs.apply_chat_template(messages, tokenize=False, **options) == segments.text
        assert ids.tolist() == theirs["input_ids"]
        starts = {start for start, _ in segments.learned}
        mask = [
            on and not any(begin < start < end for start in starts)
            for on, (begin, end) in zip(theirs["assistant_masks"], theirs["offset_mapping"], strict=True)
        ]
        assert trained.tolist() == mask
        return [segments.text[start:stop] for start, stop in segments.learned]


@pytest.fixture(scope="module")
def pair(folders: dict[str, Path]) -> Any:
    return functools.cache(lambda family: Pair(folders[family], family))


CALL = {"type": "function", "id": "call00001", "function": {"name": "add", "arguments": {"a": 1, "of": "two </s>"}}}
BARE = {"type": "function", "id": "call00002", "function": {"name": "now", "arguments": {}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}]


def said(*texts: str) -> list[dict[str, Any]]:
    """Messages of user and assistant in turn."""
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]


def test_the_token_that_ends_a_turn(pair: Any) -> None:
    found = {family: turn_end(pair(family).template, pair(family).ours) for family in FAMILIES}
    ids = tokenizer().token_to_id
    chatml, closed = ids("<|im_end|>"), ids("</s>")
    assert found == {
        "llama3": ids("<|eot_id|>"),
        "qwen2.5": chatml,
        "qwen3": chatml,
        "mistral": closed,
        "gemma": ids("<end_of_turn>"),
        "phi3": ids("<|end|>"),
        "zephyr": closed,
        "deepseek": ids("<｜end▁of▁sentence｜>"),
    }


def test_ends_of_turns_are_learned_and_nothing_after_them(pair: Any) -> None:
    found = {family: pair(family).agree(said("a", "b", "c", "d")) for family in FAMILIES}
    thinking = "<think>\n\n</think>\n\n"
    assert found == {
        "llama3": ["b<|eot_id|>", "d<|eot_id|>"],
        "qwen2.5": ["b<|im_end|>", "d<|im_end|>"],
        "qwen3": ["b<|im_end|>", f"{thinking}d<|im_end|>"],
        "mistral": [" b</s>", " d</s>"],
        "gemma": ["b<end_of_turn>", "d<end_of_turn>"],
        "phi3": ["b<|end|>", "d<|end|>"],
        "zephyr": ["b</s>", "d</s>"],
        "deepseek": ["b<｜end▁of▁sentence｜>", "d<｜end▁of▁sentence｜>"],
    }


@pytest.mark.parametrize("family", ["llama3", "qwen2.5", "qwen3", "mistral", "deepseek"])
@pytest.mark.parametrize("call", [CALL, BARE])
def test_calls_of_tools(pair: Any, family: str, call: dict[str, Any]) -> None:
    result = {"role": "tool", "content": "3", "tool_call_id": call["id"]}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    messages = [*said("a"), calling, result, *said("", "It is 3.")[1:], *said("b", "d")]
    spans = pair(family).agree(messages, TOOLS)
    assert len(spans) == 3
    assert call["function"]["name"] in spans[0]
    assert spans[0].endswith(pair(family).template.variables["eos_token"])
    pair(family).agree(messages[:4], TOOLS)
    pair(family).agree(messages[:2], TOOLS)


def test_thoughts_are_learned_as_the_final_text_has_them(pair: Any) -> None:
    thinks = "<think>\nWhy {}?\n</think>\n\nSo."
    calling = {"role": "assistant", "content": thinks.format(1), "tool_calls": [CALL]}
    result = {"role": "tool", "content": "3", "tool_call_id": "call00001"}
    end = {"role": "assistant", "reasoning_content": "Why 2?", "content": "So."}
    asked = [*said("a"), calling, result, end]
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "of": "two </s>"}}\n</tool_call><|im_end|>'
    assert pair("qwen3").agree(asked, TOOLS) == [
        f"{thinks.format(1)}\n{call}",
        f"{thinks.format(2)}<|im_end|>",
    ]
    # Rewritten: the prompt of the second turn still had the first one's thoughts.
    assert pair("qwen3").agree([*asked, *said("b", thinks.format(3))], TOOLS) == [
        f"So.\n{call}",
        "So.<|im_end|>",
        f"{thinks.format(3)}<|im_end|>",
    ]


WORDS = (
    "assistant",
    "<|im_start|>assistant\n",
    "<|im_end|>\n<|im_start|>user\n",
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "<think>\nhm\n</think>\n\n",
    "</think>",
    "<tool_response>x</tool_response>",
    "[/INST]",
    "</s>",
    "<|eot_id|>",
    "<end_of_turn>\n<start_of_turn>model\n",
    "<|end|>\n<|assistant|>\n",
    "<｜Assistant｜>",
    "{{ x }}{% if %}",
    "Sentinel1x1x",
    "And then?",
    "\n\n\nfoo",
    "   ",
    "日本語",
    "👩‍👩‍👧",
    "\u202eabc\u0301",
    "a",
)
TEXTS = st.lists(st.sampled_from(WORDS) | st.text(max_size=8), max_size=3).map("".join)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """One to six turns, the last one of the user or the assistant; often with equal contents."""
    pool = draw(st.lists(TEXTS, min_size=1, max_size=4))
    messages = said(*draw(st.lists(st.sampled_from(pool), min_size=2, max_size=6)))
    return [*([{"role": "system", "content": draw(TEXTS)}] if draw(st.booleans()) else []), *messages]


@st.composite
def with_tools(draw: st.DrawFn) -> list[dict[str, Any]]:
    """The same, with a call and its result before some of the assistant's turns."""
    messages = []
    for message in draw(conversations()):
        while message["role"] == "assistant" and draw(st.booleans()):
            call = draw(st.sampled_from((CALL, BARE)))
            result = {"role": "tool", "content": draw(TEXTS), "tool_call_id": call["id"]}
            messages += [{"role": "assistant", "content": draw(TEXTS), "tool_calls": [call]}, result]
        messages.append(message)
    return messages


def opens_thoughts(messages: list[dict[str, Any]]) -> bool:
    """Whether a text opens thoughts and never closes them: DeepSeek's prompt has opened them before."""
    return any(
        message["content"].startswith("<think>") and "</think>" not in message["content"] for message in messages
    )


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(messages=said("a", "a", "a", "a"))
@example(messages=said("<tool_response>x</tool_response>", "<think>\nhm\n</think>\n\na", "b", "c"))
@example(messages=said("Sentinel1x1x", "Sentinel1x1x"))
@example(messages=[{"role": "system", "content": "Sentinel1x1x"}, *said("", "")])
@given(messages=conversations())
def test_masks_are_transformers(pair: Any, family: str, messages: list[dict[str, Any]]) -> None:
    if family == "gemma" and messages[0]["role"] == "system":
        messages = messages[1:]
    assume(family != "deepseek" or not opens_thoughts(messages))
    pair(family).agree(messages)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama3", "qwen2.5", "qwen3", "mistral", "deepseek"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=with_tools(), tools=st.sampled_from([None, TOOLS]))
def test_masks_are_transformers_with_tools(
    pair: Any, family: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> None:
    assume(family != "deepseek" or not opens_thoughts(messages))
    pair(family).agree(messages, tools)


@pytest.mark.parametrize("family", FAMILIES)
def test_tagged_templates_give_the_same(pair: Any, family: str) -> None:
    found = conversation({"messages": said("a", "b", "c", "d", "e", "f")})
    ours = pair(family).template
    tagged = Template(pair(family).tagged, variables=ours.variables, tokens=ours.tokens)
    for learn in ("assistant", "last", "all"):
        assert render(tagged, found, learn=learn) == render(ours, found, learn=learn)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_learns_the_last_turn_only_or_all(pair: Any, family: str) -> None:
    found = conversation({"messages": said("a", "b", "c", "d")})
    template = pair(family).template
    every, last = render(template, found), render(template, found, learn="last")
    assert last.learned == every.learned[-1:]
    whole = render(template, found, learn="all")
    assert tokenise(pair(family).ours, whole)[1].all()
    assert [np.sum(tokenise(pair(family).ours, one)[1]) for one in (last, every)] != [0, 0]


@pytest.mark.parametrize("family", ["qwen3", "llama3"])
def test_learns_what_a_pattern_matches_and_the_end_if_it_reaches_it(pair: Any, family: str) -> None:
    found = conversation({"messages": said("q", "let me see <a>4</a>", "q", "<a>5</a> it is")}, "line 1")
    template, tokens = pair(family).template, pair(family).ours
    segments = render(template, found, pattern="<a>.*?</a>")
    assert [segments.text[start:stop] for start, stop in segments.learned] == ["<a>4</a>", "<a>5</a>"]
    end = turn_end(template, tokens)
    ids, learned = tokenise_ended(tokens, template, segments, {end})
    assert [bool(one) for one in learned[ids == end]][-3:] == [True, False, False]
    with pytest.raises(ConfigError, match="line 1: nothing that the assistant says matches '<b>', so that nothing is"):
        render(template, found, pattern="<b>")


def test_the_beginning_is_there_once(pair: Any) -> None:
    ids, _ = tokenise(pair("llama3").ours, render(pair("llama3").template, Conversation(tuple(said("a", "b")))))
    begin = tokenizer().token_to_id("<|begin_of_text|>")
    assert ids[0] == begin
    assert np.sum(ids == begin) == 1
