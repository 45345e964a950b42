"""SentencePiece models: the library's own ids, offsets for masks, the model's BOS and EOS; prepared and trained on."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge_train import ConfigError
from forge_train_kit.data.chats import Segments, tokenise
from forge_train_kit.data.manifest import open_prepared
from forge_train_kit.data.prepare import Preparation, Report, prepare
from forge_train_kit.data.tokenizers import encode_documents, open_tokenizer
from forge_train_plugins.data.tokenizer import Tokenizer
from forge_train_tools.testing import run_forge

sentencepiece = pytest.importorskip("sentencepiece")
pytestmark = [pytest.mark.unit]

LINES = ["Hello wörld, this is a test.", "A naïve café has 二 texts and 17 cups."] * 50
TEXTS = ["Hello  wörld 😀 二<|end|>x\nnew ﬁsh", "", " a", "</s> is text here", "\n\n"]


@pytest.fixture(params=["bpe", "unigram"])
def model(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return trained(tmp_path / request.param, model_type=request.param)


def trained(path: Path, **options: Any) -> Path:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_prefix=str(path),
        vocab_size=320,
        hard_vocab_limit=False,
        byte_fallback=True,
        minloglevel=2,
        **{"model_type": "bpe", "user_defined_symbols": ["<|end|>"], **options},
    )
    return path.with_suffix(".model")


def test_ids_are_the_librarys(model: Path) -> None:
    right, found = sentencepiece.SentencePieceProcessor(model_file=str(model)), open_tokenizer(str(model))
    assert found.vocabulary == right.get_piece_size()
    assert (found.begin, found.end, found.stops) == ((right.bos_id(),), right.eos_id(), (right.eos_id(),))
    for text in TEXTS:
        assert found.encode(text) == right.encode(text)
        assert found.decode([1, *found.encode(text), 2, 10**6]) == right.decode(right.encode(text))
    together = encode_documents(found, [text.encode() for text in TEXTS])
    assert [ids.tolist() for ids in together] == [right.encode(text) for text in TEXTS]
    assert [found.special(id) for id in (1, 2, 3)] == ["<s>", "</s>", ""]  # type: ignore[attr-defined]


def test_offsets_are_of_the_text_as_it_is(model: Path) -> None:
    found: Any = open_tokenizer(str(model))
    ids, offsets = found.encode_with_offsets(TEXTS[0])
    assert ids == found.encode(TEXTS[0])
    face = TEXTS[0].index("😀")
    assert offsets.count((face, face + 1)) == 4  # bytes of one character: each stands for all of it
    assert (TEXTS[0].index("<|end|>"), TEXTS[0].index("<|end|>") + 7) in offsets
    assert all(start < stop for start, stop in offsets)
    text, answer = "ask: hi\nanswer: ok 😀", (16, 20)
    _, learned = tokenise(found, Segments(text, (answer,)))
    ids, offsets = found.encode_with_offsets(text)
    assert learned.tolist() == [int(answer[0] <= start < answer[1]) for start, _ in offsets]
    assert learned.sum() >= 5


def test_a_model_without_ends_and_one_in_a_folder(tmp_path: Path) -> None:
    bare = open_tokenizer(str(trained(tmp_path / "bare", bos_id=-1, eos_id=-1)))
    assert (bare.begin, bare.end, bare.stops) == ((), None, ())

    model = trained(tmp_path / "tokenizer")
    alone, there = open_tokenizer(str(model)), open_tokenizer(str(tmp_path))
    assert alone.digest == there.digest != bare.digest
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"add_bos_token": False, "eos_token": "<|end|>"}))
    found = open_tokenizer(str(tmp_path))
    assert (found.begin, found.end) == ((), found.encode("<|end|>")[-1])
    assert found.digest != alone.digest == open_tokenizer(str(model)).digest
    config.write_text(json.dumps({"eos_token": "<|no|>"}))
    with pytest.raises(ConfigError, match=r"eos_token '<\|no\|>' is not in the tokenizer"):
        open_tokenizer(str(tmp_path))
    config.write_text(json.dumps({"added_tokens_decoder": {"900": {"content": "<|more|>"}}}))
    with pytest.raises(ConfigError, match=r"adds the token '<\|more\|>', which tokenizer.model has not"):
        open_tokenizer(str(tmp_path))


def test_prepared_and_trained_on(tmp_path: Path) -> None:
    model = trained(tmp_path / "mine")
    (tmp_path / "text.txt").write_text("\n".join(LINES), encoding="utf-8")
    prepare(Preparation((str(tmp_path / "text.txt"),), tmp_path / "out", tokenizer=str(model)), Report(), key="x")
    prepared, right = open_prepared(tmp_path / "out", key="x"), open_tokenizer(str(model))
    assert prepared.manifest.tokenizer["digest"] == right.digest
    ids = np.concatenate([shard.tokens for side in prepared.sides.values() for shard in side.shards]).tolist()
    assert ids.count(right.begin[0]) == ids.count(right.end)
    assert ids[0] == right.begin[0]

    config = {"tokens.path": str(tmp_path / "out"), "tokens.held_out": 0.0, "checkpoint.every": 2}
    runs = tmp_path / "runs"
    whole = run_forge(["tokens"], config, without=["text"], steps=4, name="whole", folder=runs)
    assert (whole.run / "tokenizer" / "tokenizer.model").is_file()
    run_forge(["tokens"], config, without=["text"], steps=4, stop_at=2, name="parts", folder=runs)
    parts = run_forge(["tokens"], config, without=["text"], steps=4, name="parts", folder=runs)
    assert parts.losses == whole.losses


def test_what_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for content in (b"", b"no model at all"):
        (tmp_path / "tokenizer.model").write_bytes(content)
        with pytest.raises(ConfigError, match=r"tokenizer\.model is no SentencePiece model"):
            open_tokenizer(str(tmp_path / "tokenizer.model"))
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        open_tokenizer(str(tmp_path / "gone.model"))
    (problem,) = Tokenizer(Tokenizer.Config(path=str(tmp_path / "gone.model"))).check_config(None)  # type: ignore[arg-type]
    assert "a tokenizer.json, a tokenizer.model or its folder" in problem.message

    real = builtins.__import__

    def missing(name: str, *arguments: Any, **more: Any) -> Any:
        if name == "sentencepiece":
            raise ModuleNotFoundError(name)
        return real(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match=r"needs sentencepiece to be read: pip install 'forge-train\[data\]'"):
        open_tokenizer(str(tmp_path / "tokenizer.model"))
