"""A row for each turn, special tokens that stay text, and names that no record needs."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chat_model
from forge_train import ConfigError
from forge_train_kit.data.chats import Segments, Template, conversation, literal_spans, render, tokenise
from forge_train_kit.data.manifest import open_prepared
from forge_train_kit.data.prepare import Preparation, Report, prepare
from forge_train_kit.data.tokenizers import open_tokenizer
from forge_train_kit.data.tokenizers.byte import ByteTokenizer
from forge_train_kit.data.tokenizers.literals import Literals

pytest.importorskip("transformers")
pytestmark = [pytest.mark.unit]

THOUGHTS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last and m.reasoning_content %}"
    "{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Writes thoughts after the last question alone, as Qwen3's does."""


def thinking(number: int) -> list[dict[str, str]]:
    answer = {"role": "assistant", "reasoning_content": f"t{number}", "content": f"a{number}"}
    return [{"role": "user", "content": f"q{number}"}, answer]


def made(folder: Path, records: list[Mapping[str, Any]], template: str | None = None, **more: Any) -> Any:
    """The documents of a preparation of both sides."""
    chat_model.write_tokenizer(folder / "hf", **({} if template is None else {"template": template}))
    (folder / "chats.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    prepare(wanted(folder, **more), Report(lambda line: None))
    return open_prepared(folder / "out", key="SOURCE").sides


def wanted(folder: Path, **more: Any) -> Preparation:
    options = {"tokenizer": str(folder / "hf"), "chat": True, "held_out": 0.0, **more}
    return Preparation((str(folder / "chats.jsonl"),), folder / "out", **options)


def texts(sides: Any, folder: Path, side: str = "train") -> list[tuple[str, str]]:
    """Each document with special tokens, and what of it is learned."""
    import tokenizers

    decode = tokenizers.Tokenizer.from_file(str(folder / "hf" / "tokenizer.json")).decode
    found, documents = [], sides[side]
    for number in range(documents.count):
        begin, end = documents.span(number)
        ids, kept = np.empty(end - begin, np.int64), np.empty(end - begin, bool)
        documents.take(begin, ids)
        documents.learned(begin, kept)
        found.append(tuple(decode(one.tolist(), skip_special_tokens=False) for one in (ids, ids[kept])))
    return found


def test_each_turn_is_a_row_with_its_own_thoughts(tmp_path: Path) -> None:
    messages = [*thinking(1), *thinking(2), {**thinking(3)[0]}, {**thinking(3)[1], "weight": 0}, *thinking(4)]
    found = texts(made(tmp_path, [{"messages": messages}], THOUGHTS, each_turn=True), tmp_path)
    assert [learned for _, learned in found] == [f"<think>t{n}</think>a{n}<|im_end|>" for n in (1, 2, 4)]
    whole = found[1][0]
    assert "t1" not in whole, "the template removes earlier thoughts"
    assert whole.startswith("<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n<|im_start|>user\nq2")
    assert whole.endswith("<think>t2</think>a2<|im_end|>\n")


def test_turns_of_a_conversation_are_on_one_side(tmp_path: Path) -> None:
    records = [{"messages": [{**m, "content": f"{m['content']} {n}"} for at in (1, 2, 3) for m in thinking(at)]}
               for n in range(12)]  # fmt: skip
    sides = made(tmp_path, records, THOUGHTS, each_turn=True, held_out=0.5)
    both = {side: {text[text.index(" ") + 1 :].split("<")[0] for text, _ in texts(sides, tmp_path, side)}
            for side in ("train", "validation")}  # fmt: skip
    assert both["train"]
    assert both["validation"]
    assert not both["train"] & both["validation"]
    assert sides["train"].count + sides["validation"].count == 36


def test_each_turn_says_something(tmp_path: Path) -> None:
    messages = [*thinking(1), {"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]
    with pytest.raises(ConfigError, match=r"line 1: messages\[3\]: the assistant's turn is empty"):
        made(tmp_path, [{"messages": messages}], THOUGHTS, each_turn=True)


USER = {"role": "user", "content": "is <|im_end|> or <|im_start|>user a token?"}
ANSWER = {"role": "assistant", "content": "say <|im_end|> three"}


def test_special_tokens_in_messages_stay_text(tmp_path: Path) -> None:
    sides = made(tmp_path, [{"messages": [USER, ANSWER]}], split_special_tokens=True)
    ((whole, learned),) = texts(sides, tmp_path)
    text = (
        "<|im_start|>user\nis <|im_end|> or <|im_start|>user a token?<|im_end|>\n"
        "<|im_start|>assistant\nsay <|im_end|> three<|im_end|>\n"
    )
    assert whole == text
    assert learned == "say <|im_end|> three<|im_end|>"
    assert special_counts(tmp_path, sides) == [2, 2], "only those of the template"


def test_the_rest_is_encoded_as_ever(tmp_path: Path) -> None:
    """The ids around a literal are those of transformers with `split_special_tokens` for that stretch."""
    from transformers import PreTrainedTokenizerFast

    chat_model.write_tokenizer(tmp_path)
    tokenizer: Any = open_tokenizer(str(tmp_path))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    words = "please <|im_end|>say 3<|im_start|> now"
    text = f"<|im_start|>user\n{words}<|im_end|>\n"
    literal = [(text.index(token, 12), text.index(token, 12) + len(token)) for token in ("<|im_end|>", "<|im_start|>")]
    ids, offsets = tokenizer.encode_with_literals(text, literal)
    plain = theirs(f"user\n{words}", add_special_tokens=False, split_special_tokens=True)["input_ids"]
    open_, close = tokenizer.encode("<|im_start|>"), tokenizer.encode("<|im_end|>")
    assert ids == [*open_, *plain, *close, *tokenizer.encode("\n")]
    assert "".join(text[start:stop] for start, stop in offsets) == text
    assert tokenizer.encode_with_literals(text, [])[0] == tokenizer.encode(text)


@pytest.mark.parametrize("kind", ["unigram", "wordpiece"])
def test_other_models_of_tokens_too(tmp_path: Path, kind: str) -> None:
    import tokenizers
    from tokenizers import models, pre_tokenizers

    pieces = ["<unk>", "</s>", *map(chr, range(33, 127)), "\u2581"]
    if kind == "unigram":
        model: Any = models.Unigram([(one, -1.0) for one in pieces], unk_id=0)
    else:
        every = [*pieces, *(f"##{one}" for one in pieces)]
        model = models.WordPiece({one: at for at, one in enumerate(every)}, unk_token="<unk>")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first") if kind == "unigram" else None
    made.add_special_tokens(["<unk>", "</s>", "<|extra|>"])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer: Any = open_tokenizer(str(tmp_path / "tokenizer.json"))
    ids, offsets = tokenizer.encode_with_literals("a</s>b</s>", [(1, 5)])
    end = tokenizer.encode("</s>")[-1]
    assert ids.count(end) == 1
    assert ids[-1] == end
    assert offsets[-1] == (6, 10)


def test_marks_of_thoughts_stay_tokens_in_answers() -> None:
    template = Template("{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}"
                        "{% if add_generation_prompt %}<s>assistant:{% endif %}", tokens=["<s>", "</s>"])  # fmt: skip
    found = conversation(
        {"prompt": "a [THINK] b </s>", "completion": "[THINK]c[/THINK] d</s>"},
    )
    segments = render(template, found)
    spans = literal_spans(template, found, segments.text, ["<s>", "</s>", "[THINK]", "[/THINK]"])
    assert [segments.text[start:stop] for start, stop in spans] == ["[THINK]", "</s>", "</s>"]


def test_a_template_that_reads_special_tokens_is_refused() -> None:
    template = Template("{% for m in messages %}{{ m.role }}:{{ m.content.split('</s>')[0] }};{% endfor %}"
                        "{% if add_generation_prompt %}assistant:{% endif %}")  # fmt: skip
    found = conversation({"prompt": "a</s>b", "completion": "c"}, "x.jsonl, line 3")
    with pytest.raises(ConfigError, match=r"x.jsonl, line 3: .* reads special tokens in a message"):
        literal_spans(template, found, render(template, found).text, ["</s>"])


def test_a_tokenizer_that_takes_no_other_names_is_refused_before_a_record_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Literals, tokenizer: object) -> None:
        raise ConfigError("The tokenizer can't leave special tokens as text: no")

    monkeypatch.setattr(Literals, "__init__", refused)
    with pytest.raises(ConfigError, match="^--split-special-tokens: The tokenizer can't leave special tokens as text"):
        made(tmp_path, [{"prompt": "a", "completion": "b"}], split_special_tokens=True)


TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.content %}{{ m.content }}{% endif %}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name + call.function.arguments | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_special_tokens_in_calls_and_tools_stay_text(tmp_path: Path) -> None:
    arguments = {"text": "a<|im_end|>b", "<|im_start|>": ["<|im_end|>", {"deep": "<|im_start|>user"}]}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}]},
        {"role": "tool", "content": "<|im_end|>"},
        {"role": "assistant", "content": "b"},
    ]
    schema = {"name": "f", "description": "<|im_end|>", "parameters": {"properties": {"<|im_end|>": {}}}}
    record = {"messages": messages, "tools": [{"type": "function", "function": schema}]}
    sides = made(tmp_path, [record], TOOLS, split_special_tokens=True)
    ((whole, learned),) = texts(sides, tmp_path)
    assert whole.count("<|im_end|>") == 10
    assert learned == f"f{json.dumps(arguments)}<|im_end|>b<|im_end|>"
    assert special_counts(tmp_path, sides) == [5, 5], "only those of the template"


def special_counts(folder: Path, sides: Any) -> list[int]:
    """How often the tokens that begin and end a turn are there."""
    tokenizer, documents = open_tokenizer(str(folder / "hf")), sides["train"]
    ids = np.empty(documents.tokens, np.int64)
    documents.take(0, ids)
    return [int((ids == tokenizer.encode(token)[0]).sum()) for token in ("<|im_start|>", "<|im_end|>")]


def test_no_text_stands_for_a_special_token(tmp_path: Path) -> None:
    chat_model.write_tokenizer(tmp_path / "hf")
    start, end = (open_tokenizer(str(tmp_path / "hf")).encode(token)[0] for token in ("<|im_start|>", "<|im_end|>"))
    forged = f"<|im_end|>\ufdd0{end}\ufdd1\ufdd0{start}\ufdd1\ufdd0{'0' * 20}{end}\ufdd1"
    messages = [{"role": "user", "content": forged}, ANSWER]
    sides = made(tmp_path, [{"messages": messages}], split_special_tokens=True)
    assert special_counts(tmp_path, sides) == [2, 2]
    ((whole, _),) = texts(sides, tmp_path)
    assert forged in whole


def test_a_tool_whose_special_tokens_a_template_reads_is_refused() -> None:
    template = Template("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{{ tools[0].name | length }}"
                        "{% if add_generation_prompt %}assistant:{% endif %}")  # fmt: skip
    found = conversation({"prompt": "a", "completion": "c", "tools": [{"name": "</s>"}]}, "x.jsonl, line 3")
    with pytest.raises(ConfigError, match=r"x.jsonl, line 3: .* reads special tokens in .* do not set --split-special"):
        literal_spans(template, found, render(template, found).text, ["</s>"], key="--split-special-tokens")


def test_bytes_have_no_special_tokens(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text('{"prompt": "a", "completion": "b"}')
    sources = (str(tmp_path / "c.jsonl"),)
    asked = Preparation(sources, tmp_path / "o", chat=True, template="plain", split_special_tokens=True)
    for section, key in (("", "--split-special-tokens"), ("sft", "sft.split_special_tokens")):
        with pytest.raises(ConfigError, match=f"^{key}: ByteTokenizer has no special tokens"):
            prepare(dataclasses.replace(asked, section=section), Report(lambda line: None))
    with pytest.raises(ConfigError, match="ByteTokenizer can't leave special tokens as text"):
        tokenise(ByteTokenizer(), Segments("a", ((0, 1),), (), ((0, 1),)))


@pytest.mark.parametrize(
    ("rename", "roles", "says"),
    [
        ({"prompt": "question", "completion": "answer", "system": "sys"}, {}, "--rename: system = 'sys' is of no use"),
        (
            {"prompt": "question", "completion": "answer", "content": "text"},
            {},
            "content = 'text' is of no use: no",
        ),
        ({"prompt": "question", "completion": "answer"}, {"bot": "assistant"}, "--roles: bot = 'assistant' is of no"),
        ({"prompt": "question", "completion": "answer"}, {"bot": "asistant"}, "--roles: bot stands for 'asistant'"),
        ({"promt": "question"}, {}, "--rename: no field 'promt' is read"),
    ],
)
def test_a_name_that_no_record_needs_is_refused(
    tmp_path: Path, rename: dict[str, str], roles: dict[str, str], says: str
) -> None:
    records = [{"question": "a", "answer": f"{n}"} for n in range(3)]
    with pytest.raises(ConfigError) as refused:
        made(tmp_path, records, rename=rename, roles=roles)
    assert says in str(refused.value)
    with pytest.raises(ConfigError) as again:  # what was tokenised before is not taken for done
        prepare(wanted(tmp_path, rename=rename, roles=roles), Report(lambda line: None))
    assert says in str(again.value)


def test_names_that_some_records_need_are_fine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    records = [
        {"chat": [{"who": "user", "content": "a"}, {"who": "bot", "content": "b"}]},
        {"chat": [{"who": "user", "content": "c"}, {"who": "assistant", "content": "d"}]},
    ]
    rename, roles = {"messages": "chat", "role": "who"}, {"bot": "assistant"}
    assert made(tmp_path, records, rename=rename, roles=roles)["train"].count == 2


@pytest.mark.parametrize("text", ["a\ud800b", "\udcff"])
def test_half_a_surrogate_pair_is_no_byte(text: str) -> None:
    for encode in (ByteTokenizer().encode, ByteTokenizer().encode_with_offsets):
        with pytest.raises(ConfigError, match=f"the text has half a surrogate pair at character {len(text) // 3}"):
            encode(text)
    assert ByteTokenizer().encode("é") == [0xC3, 0xA9]
