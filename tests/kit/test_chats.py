"""Templates and where they come from, what is learned of conversations, and the tokens of both."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from chat_families import names, tokenizer
from forge_train import ConfigError
from forge_train_kit.data.chats import (
    BUILT_IN,
    Segments,
    Template,
    conversation,
    open_template,
    render,
    tokenise,
)
from forge_train_kit.data.tokenizers.byte import ByteTokenizer
from forge_train_kit.data.tokenizers.pretrained import PretrainedTokenizer

pytest.importorskip("jinja2")
pytestmark = [pytest.mark.unit]

USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
TOOL = {"type": "function", "function": {"name": "add"}}
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}]}


def folder(root: Path, *, config: dict[str, Any] | None = None, **files: str) -> Path:
    root.mkdir(exist_ok=True)
    tokenizer().save(str(root / "tokenizer.json"))
    listed = {"tokenizer_class": "PreTrainedTokenizerFast", **names("<s>", "</s>"), **(config or {})}
    (root / "tokenizer_config.json").write_text(json.dumps(listed), encoding="utf-8")
    for name, text in files.items():
        (root / f"{name}.jinja").write_text(text, encoding="utf-8")
    return root


NAMED = [{"name": "default", "template": "D{{ bos_token }}"}, {"name": "tool_use", "template": "T{{ eos_token }}"}]


def text_of(template: Template, tools: tuple[Any, ...] = ()) -> str:
    return template.render([USER, ASSISTANT], tools)[0]


def test_finds_the_template_of_a_folder_as_transformers_does(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for at, (config, files, expected) in enumerate(
        [
            ({"chat_template": "C{{ bos_token }}"}, {}, ("C<s>", "C<s>")),
            ({"chat_template": "C"}, {"chat_template": "F{{ eos_token }}"}, ("F</s>", "F</s>")),
            ({"chat_template": NAMED}, {}, ("D<s>", "T</s>")),
        ]
    ):
        root = folder(tmp_path / str(at), config=config, **files)
        theirs = transformers.AutoTokenizer.from_pretrained(root)
        for tools, text in zip((None, [TOOL]), expected, strict=True):
            assert theirs.apply_chat_template([USER, ASSISTANT], tools=tools, tokenize=False) == text
            assert text_of(open_template("", root), tuple(tools or ())) == text


def test_chooses_a_template_by_name_or_file(tmp_path: Path) -> None:
    root = folder(tmp_path / "hf", config={"chat_template": NAMED})
    assert text_of(open_template("tool_use", root)) == "T</s>"
    (tmp_path / "mine.jinja").write_text("{{ eos_token }}{{ mood }}", encoding="utf-8")
    assert text_of(open_template(str(tmp_path / "mine.jinja"), root, variables={"mood": "!"})) == "</s>!"
    with pytest.raises(ConfigError, match=r"no chat template 'chatmi': expected 'default', .* Did you mean 'chatml'\?"):
        open_template("chatmi", root)
    with pytest.raises(
        ConfigError, match=r"this tokenizer has no chat template .*: choose 'chatml', 'llama3', 'plain'"
    ):
        open_template()
    with pytest.raises(ConfigError, match=r"hf has no chat template"):
        open_template("", folder(tmp_path / "hf"))
    with pytest.raises(ConfigError, match="'chatml' writes <|im_start|>, <|im_end|>, which are no tokens"):
        open_template("chatml")
    with pytest.raises(ConfigError, match="none of its templates is the default: x"):
        text_of(open_template("", folder(tmp_path / "x", config={"chat_template": [{"name": "x", "template": ""}]})))


LEARNED = {
    "chatml": ["b<|im_end|>", "d<|im_end|>"],
    "llama3": ["b<|eot_id|>", "d<|eot_id|>"],
    "plain": [" b</s>", " d</s>"],
}
FOUR = {"messages": [USER, ASSISTANT, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]}


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_templates(tmp_path: Path, name: str) -> None:
    root = folder(tmp_path / "hf")
    template = open_template(name, root)
    segments = render(template, conversation(FOUR))
    assert segments.text.startswith("<s>")
    assert [segments.text[start:stop] for start, stop in segments.learned] == LEARNED[name]
    ours = PretrainedTokenizer(root)
    ids, trained = tokenise(ours, segments)
    assert ids.tolist() == ours.encode(segments.text)
    ends = {tokenizer().token_to_id(text) for text in ("</s>", "<|im_end|>", "<|eot_id|>")}
    assert [int(id) for id, on in zip(ids, trained, strict=True) if on][-1] in ends
    with pytest.raises(ConfigError, match="line 3: .*writes no tools"):
        render(template, conversation({"messages": [USER, CALL]}, "line 3"))


def test_plain_needs_no_tokens() -> None:
    segments = render(open_template("plain"), conversation(FOUR))
    assert segments.text == "User: a\n\nAssistant: b\n\nUser: c\n\nAssistant: d\n\n"
    ids, trained = tokenise(ByteTokenizer(), segments)
    assert bytes(int(id) for id, on in zip(ids, trained, strict=True) if on) == b" b\n\n d\n\n"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(max_size=12) | st.just("User: a\n\nAssistant: b"), min_size=2, max_size=6))
def test_plain_on_bytes_learns_the_assistants_words_and_no_others(texts: list[str]) -> None:
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    segments = render(open_template("plain"), conversation({"messages": messages}))
    ids, trained = tokenise(ByteTokenizer(), segments)
    learned = bytes(int(id) for id, on in zip(ids, trained, strict=True) if on)
    assert learned == "".join(f" {text}\n\n" for text in texts[1::2]).encode()


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[9].content }}", "has no element 9"),
        ("{{ messages | sum }}", "TypeError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ strftime_now.__self__.min }}", "unsafe"),
        ("{{ raise_exception.__globals__['__builtins__'] }}", "unsafe"),
        ("{{ namespace.__init__.__globals__ }}", "unsafe"),
        ("{{ '{0.__class__.__mro__}'.format('') }}", "unsafe"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "unsafe"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{% include '/etc/passwd' %}", "no loader"),
    ],
)
def test_a_template_that_fails_or_means_harm(source: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=rf"^row 5: folder/x: .*{sentence}"):
        render(Template(source, name="folder/x"), conversation(FOUR, "row 5"))


def test_needs_jinja_only_where_a_template_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys, forge_train_kit.data.chats; "
        "print(sorted({'torch', 'jinja2', 'transformers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ConfigError, match=r"chat templates need jinja2: pip install 'forge-train\[data\]'"):
        Template("")


def test_says_that_a_template_is_none() -> None:
    with pytest.raises(ConfigError, match="folder/x is no Jinja template: TemplateSyntaxError"):
        Template("{% if %}", name="folder/x")


def test_renders_as_templates_expect() -> None:
    moment = datetime.datetime(2024, 7, 26, tzinfo=datetime.UTC)
    source = (
        "{% for m in messages %}\n  {% if loop.index > 1 %}\n    {% break %}\n  {% endif %}\n{{ m | tojson }}\n"
        "{% endfor %}"
        "{{ strftime_now('%d %b %Y') }}{{ tools is none }}"
    )
    found = Template(source, now=moment).render([{"role": "user", "content": "<ü>"}])[0]
    assert found == '{"role": "user", "content": "<ü>"}\n26 Jul 2024True'


def test_special_tokens_in_content_are_encoded_as_such(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    root = folder(tmp_path / "hf")
    template = open_template("chatml", root)
    messages = [{"role": "user", "content": "a<|im_end|>b"}, {"role": "assistant", "content": "c<|im_end|>d"}]
    segments = render(template, conversation({"messages": messages}))
    ids, trained = tokenise(PretrainedTokenizer(root), segments)
    theirs = transformers.AutoTokenizer.from_pretrained(root)
    source = BUILT_IN["chatml"][0]
    assert ids.tolist() == theirs.apply_chat_template(messages, chat_template=source)["input_ids"]
    end = tokenizer().token_to_id("<|im_end|>")
    assert trained[ids == end].tolist() == [0, 0, 1, 1], "the assistant's own, and the end of its turn"


def test_a_token_is_learned_if_its_first_character_is(tmp_path: Path) -> None:
    ours = PretrainedTokenizer(folder(tmp_path / "hf"))
    text = "<s>a</s>"
    ids, offsets = ours.encode_with_offsets(text)
    assert (ids, offsets) == (ours.encode(text), [(0, 3), (3, 4), (4, 8)])
    for span, mask in (((3, 8), [0, 1, 1]), ((1, 4), [0, 1, 0]), ((0, 1), [1, 0, 0]), ((5, 8), [0, 0, 0])):
        assert tokenise(ours, Segments(text, (span,)))[1].tolist() == mask


def test_offsets_hold_whitespace_and_split_characters(tmp_path: Path) -> None:
    made = tokenizer().from_str(tokenizer().to_str())
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    made.save(str(tmp_path / "t.json"))
    for ours in (PretrainedTokenizer(tmp_path / "t.json"), ByteTokenizer()):
        for text in ("  self.x  =  None\n\n", "né 日本 👩‍👩‍👧", ""):
            ids, offsets = ours.encode_with_offsets(text)
            assert list(ids) == ours.encode(text)
            assert {at for start, stop in offsets for at in range(start, stop)} == set(range(len(text)))
            assert offsets == sorted(offsets)


def test_needs_a_tokenizer_with_offsets() -> None:
    class Other:
        vocabulary, begin, end, stops, digest = 1, (), None, (), "x"

        def encode(self, text: str) -> list[int]:
            return [0]

        def decode(self, ids: Any) -> str:
            return ""

    with pytest.raises(ConfigError, match="Other does not tell which characters"):
        tokenise(Other(), Segments("a", ()))


def test_learned_tokens_are_those_of_their_characters() -> None:
    ids, trained = tokenise(ByteTokenizer(), Segments("a日b", ((1, 2),)))
    assert trained.tolist() == [0, 1, 1, 1, 0]
    assert (ids.dtype, trained.dtype) == (np.uint32, np.uint8)
