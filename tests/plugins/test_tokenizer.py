"""The tokenizer a model came with: the same ids as transformers', and its own special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, processors

from forge_train import ConfigError
from forge_train_kit.data.tokenizers.pretrained import PretrainedTokenizer
from forge_train_plugins.data.tokenizer import Tokenizer
from text_fakes import job, plugin, write

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.unit]

WORDS = ["?", "<s>", "</s>", "<end>", "a", "b", "c"]
"""Ids 0 to 6; the first guess for an end would be 2."""


def template(single: str, *names: str) -> Any:
    return processors.TemplateProcessing(single=single, special_tokens=[(name, WORDS.index(name)) for name in names])


def folder(root: Path, post_processor: Any = None, **files: Any) -> Path:
    """A folder with a tokenizer of seven words, and other files by their stems."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: id for id, word in enumerate(WORDS)}, "?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([AddedToken(word, special=True) for word in WORDS[1:4]])
    if post_processor is not None:
        made.post_processor = post_processor
    root.mkdir(exist_ok=True)
    made.save(str(root / "tokenizer.json"))
    files.setdefault("tokenizer_config", {"tokenizer_class": "PreTrainedTokenizerFast"})
    return write(root, {f"{name}.json": json.dumps(content) for name, content in files.items()})


BOS = template("<s> $A", "<s>")
NAMED = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<end>"}


@pytest.mark.parametrize(
    ("post_processor", "config", "begin"),
    [
        (None, NAMED, ()),
        (BOS, NAMED, (1,)),
        (template("<s> <end> $A </s>", "<s>", "<end>", "</s>"), NAMED, (1, 3)),
        (template("<s> a $A", "<s>", "a"), NAMED, (1, 4)),
        (BOS, NAMED | {"add_bos_token": False}, (1,)),
        (None, NAMED | {"add_bos_token": True}, ()),
        (BOS, NAMED | {"add_eos_token": True}, (1,)),
    ],
)
def test_what_precedes_a_text_is_what_transformers_puts_there(
    tmp_path: Path, post_processor: Any, config: dict[str, Any], begin: tuple[int, ...]
) -> None:
    root = folder(tmp_path / "hf", post_processor, tokenizer_config=config)
    ours, theirs = PretrainedTokenizer(root), transformers.AutoTokenizer.from_pretrained(root)
    assert ours.begin == begin
    assert theirs("a b").input_ids[: len(begin) + 2] == [*begin, 4, 5]
    assert ours.encode("a b") == [4, 5]
    assert ours.end == theirs.eos_token_id == 3


@pytest.mark.parametrize(
    ("files", "end", "stops"),
    [
        ({}, 2, (2,)),
        ({"tokenizer_config": NAMED}, 3, (3,)),
        ({"tokenizer_config": NAMED | {"eos_token": {"content": "<end>"}}}, 3, (3,)),
        ({"special_tokens_map": {"eos_token": {"content": "<end>"}}}, 3, (3,)),
        ({"config": {"eos_token_id": 5}}, 5, (5,)),
        ({"config": {"eos_token_id": [6, 5]}}, 6, (6, 5)),
        ({"config": {"eos_token_id": None}}, 2, (2,)),
        ({"generation_config": {"eos_token_id": [6, 5]}}, 6, (6, 5)),
        ({"config": {"eos_token_id": 5}, "generation_config": {"eos_token_id": [6, 5]}}, 5, (5, 6)),
        ({"tokenizer_config": NAMED, "generation_config": {"eos_token_id": [6, 5]}}, 3, (3, 6, 5)),
        ({"config": {"eos_token_id": 9}}, 2, (2, 9)),
    ],
)
def test_the_end_is_what_the_files_say(tmp_path: Path, files: Any, end: int, stops: tuple[int, ...]) -> None:
    root = folder(tmp_path / "hf", **files)
    for path in (root, root / "tokenizer.json"):
        found = PretrainedTokenizer(path)
        assert (found.end, found.stops) == (end, stops)
        assert found.vocabulary == 7
    alone = (root / "tokenizer.json").rename(tmp_path / "mine.json")
    assert PretrainedTokenizer(alone).end == 2, "a file of another name stands alone"


def test_rows_of_training_begin_and_end_as_the_model_knows_it(tmp_path: Path) -> None:
    root = folder(tmp_path / "hf", BOS, tokenizer_config=NAMED)
    data = write(tmp_path / "data", {"1.txt": "a b", "2.txt": "c"})
    for processor, expected in ((BOS, [1, 4, 5, 3, 1, 6, 3]), (None, [4, 5, 3, 6, 3])):
        folder(root, processor, tokenizer_config=NAMED)
        text = plugin(tmp_path / "cache", data, held_out=0.0)
        found = text._open(job(tokenizer=PretrainedTokenizer(root))).train
        assert found.tokens.tolist() == expected, "the same cache serves both, each by its own key"
        assert found.ends.tolist() == [i + 1 for i, token in enumerate(expected) if token == 3]


def test_a_tokenizer_of_somebody_elses_needs_only_encode(tmp_path: Path) -> None:
    class Letters:
        vocabulary, begin, end, stops, digest = 300, (7,), None, (), "letters"

        def encode(self, text: str) -> list[int]:
            return [ord(letter) for letter in text]

        def decode(self, ids: Any) -> str:
            return "".join(map(chr, ids))

    data = write(tmp_path / "data", {"1.txt": "ab"})
    found = plugin(tmp_path / "cache", data, held_out=0.0)._open(job(tokenizer=Letters())).train
    assert found.tokens.tolist() == [7, 97, 98]
    assert found.tokens.dtype == np.uint16
    write(data, {"1.txt": "a数"})
    with pytest.raises(ConfigError, match="gave the id 25968, and says that it has 300"):
        plugin(tmp_path / "cache", data, held_out=0.0)._open(job(tokenizer=Letters()))


def test_added_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    more = NAMED | {"added_tokens_decoder": {"7": {"content": "<new>", "special": True}}}
    root = folder(tmp_path / "hf", tokenizer_config=more)
    ours, theirs = PretrainedTokenizer(root), transformers.AutoTokenizer.from_pretrained(root)
    assert ours.encode("a <new>") == theirs("a <new>").input_ids == [4, 7]
    assert ours.vocabulary == 8
    plain = PretrainedTokenizer(folder(tmp_path / "other", tokenizer_config=NAMED))
    assert plain.digest != ours.digest
    write(root, {"tokenizer_config.json": json.dumps({"added_tokens_decoder": {"9": {"content": "<new>"}}})})
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: token '<new>' has id 9; here it is 7"):
        PretrainedTokenizer(root)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"tokenizer_config": NAMED | {"eos_token": "<gone>"}},
            r"tokenizer_config\.json: eos_token '<gone>' is not in",
        ),
        ({"special_tokens_map": {"eos_token": "<gone>"}}, r"special_tokens_map\.json: eos_token '<gone>' is not in"),
        ({"config": {"eos_token_id": "</s>"}}, r"config\.json: eos_token_id: expected an id, .* found '</s>'"),
        ({"generation_config": []}, r"generation_config\.json: expected a JSON object, found list"),
    ],
)
def test_files_that_contradict_the_tokenizer_are_refused(tmp_path: Path, files: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PretrainedTokenizer(folder(tmp_path / "hf", **files))


def test_check_config_finds_a_path_that_is_no_tokenizer(tmp_path: Path) -> None:
    def problem(path: Path | str) -> str:
        (found,) = Tokenizer(Tokenizer.Config(path=str(path))).check_config(None)  # type: ignore[arg-type]
        assert found.key == "tokenizer.path"
        return found.message

    assert "no file '/gone.json'; expected 'bytes', a tokenizer.json, a tokenizer.model or its folder." in problem(
        "/gone.json"
    )
    assert f"there is no tokenizer.json, and no other file of a tokenizer, in {tmp_path}." in problem(tmp_path)
    root = folder(tmp_path / "hf")
    for path in ("bytes", root, root / "tokenizer.json"):
        assert not list(Tokenizer(Tokenizer.Config(path=str(path))).check_config(None))  # type: ignore[arg-type]
