"""Long texts are encoded in parts, and their ids are those of the whole text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from forge_train_kit.data.tokenizers.parts import PART, parts
from forge_train_kit.data.tokenizers.pretrained import PretrainedTokenizer

pytestmark = [pytest.mark.unit]

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = ["the", "a", "don't", "naïve", "ﬁne", "e\u0301", "12345", "3.14", "x_1", "(foo)", "日本語", "文。", "🙂", "-->"]
SPACES = [" ", " ", " ", "  ", "\n", "\n\n", " \n\t", "\r\n", ", ", "。", "    ", "_", "."]


def text(length: int, seed: int) -> str:
    drawn = random.Random(seed)
    found = ""
    while len(found) < length:
        found += drawn.choice(WORDS) + drawn.choice(SPACES)
    return found


def trained(kind: str) -> Tokenizer:
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    alphabet = pre_tokenizers.ByteLevel.alphabet() if "byte" in kind or kind == "llama-3" else []
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", "<s>"], initial_alphabet=alphabet, show_progress=False
    )
    if kind == "bytes":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif kind == "bytes after a space":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif kind == "llama-3":
        made.normalizer = normalizers.NFC()
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(LLAMA_3), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        )
    elif kind == "metaspace":
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.decoder = decoders.Metaspace()
    elif kind == "unigram":
        made = Tokenizer(models.Unigram())
        made.normalizer = normalizers.NFKC()
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=200, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
        )
    made.train_from_iterator([text(20_000, 0)], trainer)
    if kind == "llama-2":  # learned within words; then the whole text is one word
        made = trained("metaspace")
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.pre_tokenizer = None
    return made


@pytest.mark.parametrize("kind", ["bytes", "bytes after a space", "llama-3", "metaspace", "unigram", "llama-2"])
def test_parts_have_the_ids_of_the_whole(kind: str) -> None:
    tokenizer = trained(kind)

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [one.ids for one in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    for seed in range(1, 6):
        long = text(8000, seed)
        cut = list(parts(long.encode(), encode, size=100 * seed))
        assert len(cut) > 5000 // (100 * seed)
        ids = [id for part, foreign in cut for id in encode([part])[0][foreign:]]
        assert ids == encode([long])[0]


def test_a_text_without_a_place_to_cut_is_left_whole() -> None:
    """Each text gets as its last id its length: no cut leaves the others as they are."""

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [[*map(ord, text), -len(text)] for text in texts]

    long = text(1000, 1)
    assert list(parts(long.encode(), encode, size=100)) == [(long, 0)]
    letters = "a" * 1000
    assert list(parts(letters.encode(), lambda texts: [list(map(ord, text)) for text in texts], size=100)) == [
        (letters, 0)
    ]


def test_long_and_short_documents_together(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    trained("bytes").save(str(file))
    documents = [text(size, size) for size in (10, 3 * PART, 1, PART + 1, 500)]
    found = PretrainedTokenizer(file).encode_documents([document.encode() for document in documents])
    whole = tokenizers.Tokenizer.from_file(str(file))
    assert [ids.tolist() for ids in found] == [whole.encode(document).ids for document in documents]
