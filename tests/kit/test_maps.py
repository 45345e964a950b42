"""Maps of documents: filters, fill-in-the-middle, a stranger's map; the same in every preparation."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_train import ConfigError
from forge_train_kit.data import maps
from forge_train_kit.data.manifest import open_prepared
from forge_train_kit.data.maps import Maps
from forge_train_kit.data.prepare import Preparation, Report, prepare, tasks
from forge_train_plugins.data.maps import FillInTheMiddle, Length

pytestmark = pytest.mark.unit


class Twice:
    """A stranger's map: each document, and once more in a random order of its words."""

    def __call__(self, text: str, random: Random) -> list[str]:
        words = text.split()
        random.shuffle(words)
        return [text, " ".join(words)]


class Broken:
    def __call__(self, text: str, random: Random) -> list[str]:
        raise KeyError("x")


@pytest.fixture(autouse=True)
def strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    real = maps._points()
    more = {name: [EntryPoint(name, f"test_maps:{name.title()}", maps.GROUP)] for name in ("twice", "broken")}
    more["claimed"] = more["twice"] * 2
    monkeypatch.setattr(maps, "_points", lambda: {**real, **more})


@given(text=st.text(min_size=1), seed=st.integers(0, 1000), spm=st.sampled_from([0.0, 1.0]))
def test_fill_in_the_middle_loses_nothing(text: str, seed: int, spm: float) -> None:
    (made,) = FillInTheMiddle(1.0, spm, "⟨P⟩", "⟨S⟩", "⟨M⟩")(text, Random(seed))
    prefix, _, rest = made.removeprefix("⟨P⟩").partition("⟨S⟩")
    suffix, _, middle = rest.rpartition("⟨M⟩") if "⟨M⟩" not in text else (rest, "", "")
    if not {"⟨P⟩", "⟨S⟩", "⟨M⟩"} & set(text):
        assert prefix + middle + suffix == text


def test_fill_in_the_middle_takes_its_share() -> None:
    made = [next(iter(FillInTheMiddle(0.25)(f"text {at}", Random(at)))) for at in range(2000)]
    assert 430 < sum(one.startswith("<|fim_prefix|>") for one in made) < 570
    assert list(FillInTheMiddle(0.0)("text", Random(0))) == ["text"]


def test_length_leaves_out() -> None:
    assert [list(Length(2, 3)(text, Random(0))) for text in ("a", "ab", "abc", "abcd")] == [[], ["ab"], ["abc"], []]


def test_one_after_the_other() -> None:
    (first, second) = Maps(["length:least=5", "twice"])(b"one two three four")
    assert first == b"one two three four"
    assert sorted(second.split()) == sorted(first.split())
    assert second != first
    assert list(Maps(["twice", "length:least=5"])(b"ab")) == []
    assert list(Maps(["twice"])(b"one two three four")) == [first, second], "drawn by the document alone"
    assert list(Maps([])(b"\xff")) == [b"\xff"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("lenght", r"there is no such map\. Did you mean 'length'\?"),
        ("length:least", "expected name:option=value"),
        ("length:size=3", "unexpected keyword argument 'size'"),
        ("length:least=9,most=3", "0 <= least <= most, found least=9 and most=3"),
        ("length:least=x", "expected numbers, .* found least=x"),
        ("claimed", "is a map of .* and .*; uninstall one"),
        ("length", "has no effect: give least"),
        ("fim:rate=2", "expected shares from 0 to 1"),
    ],
)
def test_wrong_specs(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Maps([spec])


def texts(folder: Path) -> list[str]:
    found = []
    for documents in open_prepared(folder, key="x").sides.values():
        for at in range(documents.count):
            start, stop = documents.span(at)
            ids = np.empty(stop - start - 1, np.int64)
            documents.take(start, ids)
            found.append(bytes(ids.tolist()).decode())
    return sorted(found)


def test_in_a_preparation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "TASK", 300)
    written = [f"document {at} " * (at % 4 + 1) for at in range(40)]
    source = tmp_path / "a.jsonl"
    source.write_text("\n".join(json.dumps({"text": text}) for text in written))

    def wanted(out: str, *specs: str, **options: Any) -> Preparation:
        return Preparation((str(source),), tmp_path / out, maps=specs, **options)

    manifest = prepare(wanted("out", "length:least=20"), Report())
    assert texts(tmp_path / "out") == sorted(text for text in written if len(text) >= 20)
    assert manifest.settings["maps"] == ["length:least=20"]
    with pytest.raises(ConfigError, match=r"begun with something else \(maps\)"):
        prepare(wanted("out"), Report())
    with pytest.raises(ConfigError, match=r"'<\|fim_prefix\|>' is no token of this tokenizer"):
        prepare(wanted("fim", "fim"), Report())
    with pytest.raises(ConfigError, match="--map broken: failed on the document 'document 0 ': KeyError"):
        prepare(wanted("broken", "broken"), Report())
