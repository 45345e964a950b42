"""What `forge data inspect` finds: the numbers are those of the data, and damage is told."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from forge_train import ConfigError
from forge_train_kit.data.inspection import Asked, DamagedError, Lengths, inspect, material
from forge_train_kit.data.inspection.samples import texts_of
from forge_train_kit.data.labels import Labels
from forge_train_kit.data.prepare import Preparation, Report, prepare, tasks
from forge_train_kit.data.tokenizers import open_tokenizer
from forge_train_kit.data.tokenizers.byte import ByteTokenizer
from forge_train_kit.heads import Classes

pytestmark = pytest.mark.unit
TEXTS = [f"Text {at}: Größe 😀\n" * (at + 1) for at in range(40)]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tasks, "TASK", 1000)
    folder = tmp_path / "texts"
    folder.mkdir()
    for start in range(0, 41, 7):
        lines = [json.dumps({"text": text}) + "\n" for text in [*TEXTS, TEXTS[3]][start : start + 7]]
        (folder / f"{start:02}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def prepared(source: Path, **options: int) -> Path:
    out = source.parent / "out"
    prepare(Preparation((str(source),), out, held_out=0.2, **options), Report())  # type: ignore[arg-type]
    return out


def test_a_prepared_folder(source: Path) -> None:
    found = inspect(Asked((str(prepared(source)),)))
    sizes = [len(text.encode()) for text in [*TEXTS, TEXTS[3]]]
    assert (found.kind, found.documents, found.tokens) == ("prepared", 41, sum(sizes) + 41)
    assert found.learned == found.tokens
    assert found.facts["bytes"] == sum(sizes)
    assert sum(found.facts[side]["documents"] for side in ("train", "validation")) == 41
    assert found.lengths.longest == max(sizes) + 1
    assert found.duplicates.exact == 1
    json.dumps(found.table())


def test_a_source_gives_what_its_preparation_gives(source: Path) -> None:
    direct, made = inspect(Asked((str(source),))), inspect(Asked((str(prepared(source)),)))
    assert (direct.tokens, direct.lengths) == (made.tokens, made.lengths)
    assert direct.facts["read"] == "all"
    assert direct.facts["bytes"] == made.facts["bytes"]


def test_only_the_beginning_of_a_source_is_read(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(material, "SAMPLE", 100)
    (source.parent / "second.jsonl").write_text('{"broken', encoding="utf-8")
    found = inspect(Asked((str(source), str(source.parent / "second.jsonl"))))
    assert (found.documents, found.facts["read"]) == (3, "beginning")
    assert (found.facts["files_read"], found.facts["source_files"]) == (1, 7)


@pytest.mark.parametrize("at", [1024, -1, -200])
def test_damaged_shards_are_named(source: Path, at: int) -> None:
    out = prepared(source)
    shards = sorted(out.glob("*.tokens"))
    assert len(shards) > 4
    for shard in (shards[1], shards[-1]):
        content = bytearray(shard.read_bytes())
        content[at] ^= 1
        shard.write_bytes(content)
    with pytest.raises(DamagedError) as caught:
        inspect(Asked((str(out),)))
    assert caught.value.code == 1
    named = [shard for shard in shards if str(shard) in str(caught.value)]
    assert named == [shards[1], shards[-1]]


@pytest.mark.parametrize("train_tokenizer", [0, 400])
def test_samples_are_the_text(source: Path, train_tokenizer: int) -> None:
    found = inspect(Asked((str(prepared(source, train_tokenizer=train_tokenizer)),)), count=100)
    assert len(found.samples) == 41
    for sample in found.samples:
        assert len(sample.tokens) <= 160
        first: list[str] = []
        for token in sample.tokens:
            if token.special:
                break
            assert token.text is not None
            first.append(token.text)
        assert any(text.startswith("".join(first).rstrip("\ufffd")) for text in TEXTS), first
        assert all(token.special == token.ends for token in sample.tokens)
    assert sum(token.ends for sample in found.samples for token in sample.tokens) > 10


def test_a_character_of_several_tokens_stands_at_the_last() -> None:
    texts = list(texts_of(ByteTokenizer(), [*"aß😀".encode(), 256, 0xFF]))
    assert texts == [
        ("a", False),
        ("", False),
        ("ß", False),
        *[("", False)] * 3,
        ("😀", False),
        ("<end>", True),
        ("", False),
    ]


def test_a_space_before_a_word_is_kept(source: Path) -> None:
    tokenizer = open_tokenizer(str(prepared(source, train_tokenizer=400) / "tokenizer"))
    text = "Text 4: Größe 😀 Größe\n"
    assert "".join(part for part, _ in texts_of(tokenizer, tokenizer.encode(text))) == text


def test_what_is_learned_of_chats(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}] * 2
    file.write_text(json.dumps({"messages": turns}) + "\n", encoding="utf-8")
    learned = {}
    for learn in ("assistant", "last", "all"):
        found = inspect(Asked((str(file),), chat=True, template="plain", learn=learn))  # type: ignore[arg-type]
        [sample] = found.samples
        learned[learn] = "".join(token.text or "" for token in sample.tokens if token.learned)
        assert found.learned == sum(token.learned for token in sample.tokens)
    assert learned["assistant"].count("Yes") == 2
    assert learned["last"].count("Yes") == 1
    assert "Hi" not in learned["assistant"]
    assert "Hi" in learned["all"]


@pytest.mark.parametrize("each_turn", [False, True])
def test_bytes_of_chats_are_those_of_their_documents(tmp_path: Path, each_turn: bool) -> None:
    file = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Größe"}]
    file.write_text(json.dumps({"messages": [*turns, *turns]}) + "\n", encoding="utf-8")
    one = len("User: Hi\n\nAssistant: Größe\n\n".encode())
    direct = inspect(Asked((str(file),), chat=True, template="plain", each_turn=each_turn))
    asked = Preparation((str(file),), tmp_path / "out", chat=True, template="plain", each_turn=each_turn, held_out=0)
    prepare(asked, Report())
    made = inspect(Asked((str(tmp_path / "out"),)))
    assert direct.facts["bytes"] == made.facts["bytes"] == (3 if each_turn else 2) * one


def test_bytes_of_pairs_are_those_of_both_members(tmp_path: Path) -> None:
    texts, answers = (tmp_path / f"{name}.jsonl" for name in ("texts", "answers"))
    texts.write_text(json.dumps({"anchor": "a", "positive": "bbb"}) + "\n")
    answers.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "cccc"}) + "\n")
    asked = Preparation((str(texts),), tmp_path / "a", pairs="embedding", held_out=0)
    assert prepare(asked, Report()).total("bytes") == 4
    asked = Preparation((str(answers),), tmp_path / "b", chat=True, template="plain", pairs="preference", held_out=0)
    assert prepare(asked, Report()).total("bytes") == 2 * len("User: a\n\nAssistant: \n\n") + 5


def test_bytes_of_labelled_texts_are_those_of_the_texts(tmp_path: Path) -> None:
    file = tmp_path / "labels.jsonl"
    file.write_text(json.dumps({"text": "abcd", "label": "yes"}) + "\n")
    labels = Labels(Classes(("no", "yes"), "text"), "text", "label", "")
    asked = Preparation((str(file),), tmp_path / "out", labels=labels, held_out=0)
    assert prepare(asked, Report()).total("bytes") == 4


def test_tokens_of_another_program(tmp_path: Path) -> None:
    file = tmp_path / "train.bin"
    np.array([72, 105, 256, 72, 105, 256, 33], "<u2").tofile(file)
    known = inspect(Asked((str(file),), dtype="uint16", tokenizer="bytes"))
    assert (known.documents, known.duplicates.exact) == (3, 1)
    assert [token.text for token in known.samples[0].tokens[:4]] == ["H", "i", "<end>", "H"]
    unknown = inspect(Asked((str(file),), dtype="uint16"))
    assert (unknown.documents, unknown.samples[0].tokens[0].text) == (1, None)
    assert unknown.facts["largest"] == 256


def test_lengths() -> None:
    found = Lengths.of(np.array([1, 2, 3, 4, 7, 8, 1023, 1024]))
    assert [low for low, _, _ in found.bins] == [2**at for at in range(11)]
    assert [high for _, high, _ in found.bins] == [2 ** (at + 1) - 1 for at in range(11)]
    assert [count for _, _, count in found.bins] == [1, 2, 2, 1, 0, 0, 0, 0, 0, 1, 1]
    assert (found.quantiles, found.longest, found.mean) == ({5: 1, 50: 4, 95: 1024}, 1024, 259.0)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"template": "plain"}, "--template: has no effect: it is for --chat"),
        ({"learn": "all"}, "--learn: has no effect"),
        ({"chat": True, "field": "x", "template": "plain"}, "--field: has no effect"),
        ({"field": "x"}, "no string under 'x' \\(--field\\)"),
        ({"dtype": "uint16", "chat": True}, "--chat: has no effect"),
        ({"tokenizer": "nowhere"}, "nowhere can't be read"),
    ],
)
def test_options_that_do_not_fit(source: Path, options: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        inspect(Asked((str(source),), **options))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_bad_input(source: Path) -> None:
    out = prepared(source)
    cases: list[tuple[Asked, str]] = [
        (Asked((str(out),), tokenizer="bytes"), "--tokenizer: has no effect"),
        (Asked((str(out), str(source))), "holds tokens already: inspect it alone"),
    ]
    for name, content, dtype, told in (
        ("empty.jsonl", b"", "", "there is no text in 1 file."),
        ("broken.jsonl", b'{"text": "a"}\n{"te', "", "line 2"),
        ("cut.bin", b"abc", "uint16", "cut.bin is truncated or not of uint16"),
        ("raw.bin", b"abcd", "", "set --dtype to uint16"),
        ("raw2.bin", b"abcd", "u2", "--dtype: 'u2' is none of"),
    ):
        (source.parent / name).write_bytes(content)
        cases.append((Asked((str(source.parent / name),), dtype=dtype), told))
    large = source.parent / "large.bin"
    np.array([1, 256, 300], "<u2").tofile(large)
    cases.append(
        (Asked((str(large),), dtype="uint16", tokenizer="bytes"), "the token id 300 at 2, .* Set --tokenizer to")
    )
    for asked, told in cases:
        with pytest.raises(ConfigError, match=told) as caught:
            inspect(asked)
        assert "\n" not in str(caught.value)
    (out / "manifest.json").unlink()
    with pytest.raises(ConfigError, match="was not prepared to the end"):
        inspect(Asked((str(out),)))
