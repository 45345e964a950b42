"""Every file of a tokenizer's folder is read: ids, begin and end are those of transformers on the same folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from forge_train import ConfigError
from forge_train_kit import model_files
from forge_train_kit.data.tokenizers import encode_documents, open_tokenizer

transformers = pytest.importorskip("transformers")
sentencepiece = pytest.importorskip("sentencepiece")
tokenizers = pytest.importorskip("tokenizers")
pytestmark = [pytest.mark.unit]

LINES = ["Hello wörld, this is a test of a café.", "say one two three <|user|> hi </s>"] * 40
TEXTS = [
    *("Hello wörld", "a <|user|> b", "a  <|user|>  b", "x</s>y </s> z", "<s>Hi</s>", "say<tool>one <tool> two", "\n\n"),
    *("", "<|user|><|user|>", "[PAD] <image> [EXTRA] x[EXTRA]y", "the</s>\n<|im_end|>one", " lead", "二 😀"),
]


def spm(folder: Path) -> None:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=310,
        hard_vocab_limit=False,
        byte_fallback=True,
        minloglevel=2,
        model_type="bpe",
    )
    (folder / "tokenizer.vocab").unlink()
    write(folder, "config.json", model_type="llama")


def byte_level(folder: Path, *, special: tuple[str, ...] = ()) -> Any:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330, special_tokens=list(special), initial_alphabet=sorted(alphabet), show_progress=False
    )
    made.train_from_iterator(LINES, trainer)
    return made


def gpt2(folder: Path) -> None:
    byte_level(folder).model.save(str(folder))
    write(folder, "config.json", model_type="gpt2")


def backend(folder: Path) -> None:
    byte_level(folder, special=("<s>", "</s>")).save(str(folder / "tokenizer.json"))
    write(folder, "tokenizer_config.json", tokenizer_class="TokenizersBackend")


def write(folder: Path, name: str, **values: Any) -> None:
    file = folder / name
    known = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(known | values))


def token(content: str, **flags: bool) -> dict[str, Any]:
    plain = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    return {"content": content, **plain, **flags}


def assert_as_transformers(folder: Path) -> Any:
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), open_tokenizer(str(folder))
    for text in TEXTS:
        assert list(ours.encode(text)) == theirs.encode(text, add_special_tokens=False), text
    assert [list(map(int, ids)) for ids in encode_documents(ours, [text.encode() for text in TEXTS])] == [
        theirs.encode(text, add_special_tokens=False) for text in TEXTS
    ]
    assert ours.vocabulary == max(theirs.get_vocab().values()) + 1
    whole, bare = theirs.encode("Hello"), theirs.encode("Hello", add_special_tokens=False)
    assert list(ours.begin) == whole[: len(whole) - len(bare)]
    if theirs.eos_token_id is not None:
        assert ours.end == theirs.eos_token_id
    return ours


FILES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "plain": {},
    "begin": {"tokenizer_config.json": {"add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}},
    "chat template": {"tokenizer_config.json": {"chat_template": "{{ messages }}</s>", "eos_token": "</s>"}},
    "legacy": {"tokenizer_config.json": {"legacy": True}},
    "added_tokens.json": {"added_tokens.json": {"<|user|>": -1, "<tool>": -2}},
    "special_tokens_map.json": {
        "special_tokens_map.json": {
            "eos_token": "</s>",
            "pad_token": token("[PAD]"),
            "extra_special_tokens": ["<tool>"],
        }
    },
    "additional": {"tokenizer_config.json": {"additional_special_tokens": ["<|user|>", "<tool>"]}},
    "additional in the map": {"special_tokens_map.json": {"additional_special_tokens": ["<|user|>"]}},
    "extra": {"tokenizer_config.json": {"extra_special_tokens": ["[EXTRA]"]}},
    "extra by name": {"tokenizer_config.json": {"extra_special_tokens": {"image_token": "<image>"}}},
    "a token of the model": {"tokenizer_config.json": {"image_token": "<image>"}},
    "flags": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {
                "-1": token("<|user|>", lstrip=True, rstrip=True),
                "-2": token("<tool>", single_word=True),
                "-3": token("[EXTRA]", normalized=True, special=False),
            }
        }
    },
    "split": {"tokenizer_config.json": {"split_special_tokens": True, "eos_token": "</s>"}},
    "named and in the vocabulary": {"tokenizer_config.json": {"eos_token": "say", "pad_token": "[PAD]"}},
}


@pytest.mark.parametrize("beside", FILES)
@pytest.mark.parametrize("made", [spm, gpt2, backend])
def test_ids_are_those_of_transformers(tmp_path: Path, made: Callable[[Path], None], beside: str) -> None:
    made(tmp_path)
    size = open_tokenizer(str(tmp_path)).vocabulary
    for name, values in FILES[beside].items():
        if name == "added_tokens.json":
            values = {content: size - 1 - at for content, at in values.items()}
        if decoder := values.get("added_tokens_decoder"):
            values = {**values, "added_tokens_decoder": {str(size - 1 - int(at)): one for at, one in decoder.items()}}
        write(tmp_path, name, **values)
    assert_as_transformers(tmp_path)


def test_flags_beside_a_tokenizer_precede_its_own(tmp_path: Path) -> None:
    backend(tmp_path)
    before = open_tokenizer(str(tmp_path))
    write(tmp_path, "tokenizer_config.json", added_tokens_decoder={"1": token("</s>", lstrip=True, rstrip=True)})
    after = assert_as_transformers(tmp_path)
    assert after.encode("x </s> z") != before.encode("x </s> z")
    assert after.digest != before.digest


@pytest.mark.parametrize("made", [spm, gpt2, backend])
def test_a_stop_beyond_the_vocabulary_does_not_enlarge_it(tmp_path: Path, made: Callable[[Path], None]) -> None:
    made(tmp_path)
    before = open_tokenizer(str(tmp_path))
    for name in ("config.json", "generation_config.json"):
        write(tmp_path, name, eos_token_id=[9999, 1])
        after = open_tokenizer(str(tmp_path))
        assert after.vocabulary == before.vocabulary
        assert after.end is not None
        assert after.end < after.vocabulary
        assert 9999 in after.stops, "a padded embedding may have it"


@pytest.mark.parametrize("made", [spm, gpt2])
def test_a_copy_of_the_files_is_the_same_tokenizer(tmp_path: Path, made: Callable[[Path], None]) -> None:
    there = tmp_path / "there"
    there.mkdir()
    made(there)
    model_files.copy(model_files.files(there), tmp_path / "copy")
    assert open_tokenizer(str(tmp_path / "copy")).digest == open_tokenizer(str(there)).digest


def lfs(folder: Path, name: str) -> None:
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"vocab.json": "{}"}, r"vocab\.json can't be used as a tokenizer \(.*merges"),
        (
            {"vocab.txt": "a\nb"},
            r"vocab\.txt can't be used as a tokenizer \(.*reads merges\.txt, vocab\.json instead\)",
        ),
        ({"tokenizer.model": "IQ== 0\n"}, r"tokenizer\.model can't be used as a tokenizer \("),
        ({"qwen.tiktoken": "IQ== 0\n"}, r"qwen\.tiktoken can't be used as a tokenizer \("),
        ({"tokenizer.json": None}, r"tokenizer\.json is a pointer of Git LFS.*run git lfs pull"),
        ({"tokenizer.model": None}, r"tokenizer\.model is a pointer of Git LFS"),
        ({"vocab.json": None, "merges.txt": "a b"}, r"vocab\.json is a pointer of Git LFS"),
        ({}, r"has no tokenizer"),
    ],
)
def test_files_that_make_no_tokenizer_are_refused(tmp_path: Path, files: dict[str, str | None], message: str) -> None:
    write(tmp_path, "config.json", model_type="gpt2")
    for name, content in files.items():
        lfs(tmp_path, name) if content is None else (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message) as refused:
        open_tokenizer(str(tmp_path))
    assert "\n" not in str(refused.value)


def test_a_model_alone_does_not_spell_control_pieces_of_a_chat(tmp_path: Path) -> None:
    spm(tmp_path)
    (tmp_path / "config.json").unlink()
    alone: Any = open_tokenizer(str(tmp_path / "tokenizer.model"))
    with pytest.raises(ConfigError, match=r"the text holds '</s>', which a SentencePiece model alone spells in pieces"):
        alone.encode_with_offsets("say </s>")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}</s>")
    with pytest.raises(ConfigError, match="no file says of which class the tokenizer is"):
        open_tokenizer(str(tmp_path))
    write(tmp_path, "tokenizer_config.json", tokenizer_class="LlamaTokenizer")
    assert_as_transformers(tmp_path)
    shutil.rmtree(tmp_path)
