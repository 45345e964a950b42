"""Bits per byte, the trigram baseline, and speed."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_train import Evaluation
from forge_train_kit.data.held_out import Side
from forge_train_kit.data.tokenizers.pretrained import PretrainedTokenizer
from forge_train_plugins.data._text import baseline
from forge_train_plugins.data._text.baseline import trigram_bits_per_byte
from text_fakes import job, plugin, prose, write

pytestmark = pytest.mark.unit


def oracle(documents: list[tuple[Side, bytes]]) -> float:
    """Witten-Bell trigram bits per byte, written down from the formula."""
    after: defaultdict[bytes, Counter[int]] = defaultdict(Counter)
    for side, text in documents:
        if side == "train":
            for end, order in itertools.product(range(len(text)), range(3)):
                if end >= order:
                    after[text[end - order : end]][text[end]] += 1

    def probability(context: bytes, byte: int) -> float:
        lower = probability(context[1:], byte) if context else 1 / 256
        seen = after[context]
        kinds = len(seen)
        return (seen[byte] + kinds * lower) / (seen.total() + kinds) if kinds else lower

    held_out = [text for side, text in documents if side == "validation"]
    bits = [-math.log2(probability(text[max(0, i - 2) : i], text[i])) for text in held_out for i in range(len(text))]
    return sum(bits) / len(bits)


class TestTrigram:
    @given(
        train=st.lists(st.binary(min_size=1, max_size=30), max_size=8),
        held_out=st.lists(st.binary(min_size=1, max_size=12), min_size=1, max_size=4),
    )
    @settings(max_examples=8, deadline=None)
    def test_agrees_with_the_formula(self, train: list[bytes], held_out: list[bytes]) -> None:
        documents: list[tuple[Side, bytes]] = [("train", text) for text in train]
        documents += [("validation", text) for text in held_out]
        assert trigram_bits_per_byte(documents) == pytest.approx(oracle(documents), rel=1e-12)

    def test_agrees_in_chunks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        documents: list[tuple[Side, bytes]] = [
            ("validation" if seed % 5 == 0 else "train", prose(seed).encode()) for seed in range(20)
        ]
        monkeypatch.setattr(baseline, "_CHUNK", 700)
        assert trigram_bits_per_byte(documents) == pytest.approx(oracle(documents), rel=1e-12)

    def test_nothing_held_out(self) -> None:
        assert trigram_bits_per_byte([("train", b"hello")]) is None


class TestEvaluation:
    @pytest.fixture
    def data(self, tmp_path: Path) -> Path:
        return write(tmp_path / "data", {f"{seed}.txt": prose(seed) for seed in range(30)})

    @staticmethod
    def evaluate(text: Any, loss: float) -> dict[str, float]:
        evaluation = Evaluation(step=1, loss=loss, tokens=10, owner="text")
        text.on_log(evaluation)
        return evaluation.metrics

    def test_bytes(self, tmp_path: Path, data: Path) -> None:
        text = plugin(tmp_path / "cache", data, held_out=0.3)
        assert not self.evaluate(text, 2.0), "nothing to say before there is held-out text"
        text.build_data(job(), "validation")
        metrics = self.evaluate(text, 2 * math.log(2))
        assert metrics["text.bits_per_byte"] == pytest.approx(2.0, rel=1e-12)
        assert 2 < metrics["text.trigram_bits_per_byte"] < 5

    def test_the_ratio_of_a_bpe_enters(self, tmp_path: Path, data: Path) -> None:
        words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "a": 1, "</s>": 2}, unk_token="?"))
        words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        words.save(str(tmp_path / "w.json"))
        text = plugin(tmp_path / "cache", data, held_out=0.3, baseline=False)
        text.build_data(job(tokenizer=PretrainedTokenizer(tmp_path / "w.json")), "validation")
        part = text._corpus.validation  # type: ignore[union-attr]
        predicted = len(part.tokens) - len(part.ends)
        metrics = self.evaluate(text, 5.0)
        assert metrics == {"text.bits_per_byte": pytest.approx(5 / math.log(2) * predicted / part.bytes)}

    def test_the_baseline_is_counted_once(self, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = plugin(tmp_path / "cache", data)
        first.build_data(job(), "validation")
        expected = self.evaluate(first, 1.0)
        monkeypatch.setattr("forge_train_plugins.data._text.corpus.trigram_bits_per_byte", None)
        second = plugin(tmp_path / "cache", data)
        second.build_data(job(), "validation")
        assert self.evaluate(second, 1.0) == expected

    def test_files_that_vanish_do_not_end_the_run(
        self, tmp_path: Path, data: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        text = plugin(tmp_path / "cache", data)
        text.build_data(job(), "validation")
        data.rename(tmp_path / "away")
        assert list(self.evaluate(text, 1.0)) == ["text.bits_per_byte"]
        self.evaluate(text, 1.0)
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert [text[:24] for text in warnings] == ["text: no trigram baselin"]


def test_a_million_tokens_take_little(tmp_path: Path) -> None:
    """The bound is loose, for shared machines: an idle core does 20 million tokens a second and more."""
    write(tmp_path, {"x.txt": prose(1, 20_000)})
    loader = plugin(tmp_path / "cache", tmp_path / "x.txt").build_data(job(sequence=512, micro_batch=8), "train")
    next(loader)
    start = time.process_time()
    for _ in range(256):
        next(loader)
    assert 256 * 8 * 512 / (time.process_time() - start) > 4e6


def test_importing_and_checking_load_nothing_slow() -> None:
    code = (
        "import sys; from forge_train_plugins.data.text import Text;"
        "list(Text(Text.Config(path='gone')).check_config(None));"
        "sys.exit(str({'torch', 'numpy', 'tokenizers'} & set(sys.modules)) if {'torch', 'numpy', 'tokenizers'}"
        " & set(sys.modules) else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
