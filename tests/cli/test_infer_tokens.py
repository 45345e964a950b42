"""`forge infer`: log-probabilities of single tokens, and texts that are longer than what the model reads at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import forge_cli
import heads_data
from forge_cli import forge, one_message
from forge_train_tools import open_model

LONGEST = 64
WINDOWS = ("--outputs", "log_likelihood,per_token", "--long", "windows", "--batch", "3")


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of a language model of bytes, and texts of up to eight times what it reads at once."""
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "mine.toml").write_text(forge_cli.DECODER + '[text]\npath = "texts.jsonl"\n', encoding="utf-8")
    source = "".join(heads_data.passages("json", 40))
    sizes = (10, 64, 65, 66, 500, 3, 129, 130, 128, 20)
    heads_data.write(folder / "texts.jsonl", ({"text": source[at : at + size]} for at, size in enumerate(sizes)))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        ended = forge("train", "mine.toml", "--name", "first", "--quiet")
        assert ended.code == 0, ended.err
    return folder


@pytest.fixture(autouse=True)
def here(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)


def infer(out: Path, *more: object, data: object = "texts.jsonl") -> list[dict[str, Any]]:
    ended = forge("infer", "runs/first", "--data", data, "--out", out, *more)
    assert ended.code == 0, ended.err
    return lines(out) if out.suffix == ".jsonl" else []


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def rolling(ids: list[int], longest: int) -> Iterator[tuple[list[int], list[int]]]:
    """What lm-evaluation-harness gives a model, and the tokens that it predicts (`get_rolling_token_windows`)."""
    prefix, tokens = ids[0], ids[1:]
    first = tokens[:longest]
    yield [prefix, *first[:-1]], first
    done = len(first)
    while done < len(tokens):
        size = min(len(tokens) - done, longest)
        end = done + size
        yield (
            tokens[max(end - longest - 1, 0) : end - 1] if end > longest else [prefix, *tokens[: end - 1]],
            tokens[end - size : end],
        )
        done += size


def in_fp64(texts: list[str]) -> list[list[float]]:
    """The log-probability of each token but the first, in windows."""
    model = open_model("runs/first")
    module = model.module.double()
    found = []
    for text in texts:
        each: list[float] = []
        for given, predicted in rolling(model.tokenizer.encode(text), LONGEST):
            with torch.no_grad():
                chances = module.head(module(torch.tensor([given])))[0].log_softmax(-1)
            rows = chances[-len(predicted) :]
            each += [float(row[one]) for row, one in zip(rows, predicted, strict=True)]
        found.append(each)
    return found


def test_windows_are_those_of_a_plain_computation(tmp_path: Path) -> None:
    texts = [record["text"] for record in lines(Path("texts.jsonl"))]
    found = infer(tmp_path / "out.jsonl", *WINDOWS)
    for one, text, expected in zip(found, texts, in_fp64(texts), strict=True):
        assert one["tokens"] == len(text) - 1 == len(expected)
        assert one["log_likelihood"] == pytest.approx(sum(expected), rel=1e-6)
        assert one["token_log_probabilities"] == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert bytes(one["token_ids"]).decode() == text[1:]
        assert one["token_offsets"] == [[at, at + 1] for at in range(1, len(text))]


def test_windows_change_no_short_text(tmp_path: Path) -> None:
    data = heads_data.write(tmp_path / "short.jsonl", [r for r in lines(Path("texts.jsonl")) if len(r["text"]) <= 64])
    infer(tmp_path / "one.jsonl", data=data)
    infer(tmp_path / "other.jsonl", "--long", "windows", data=data)
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "other.jsonl").read_bytes()


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_record_that_was_half_computed_is_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    from forge_train_tools.inference import infer as job
    from forge_train_tools.inference.output_file import OutputFile

    infer(tmp_path / f"whole.{suffix}", *WINDOWS)
    out, add, stops = tmp_path / f"out.{suffix}", OutputFile.add, []

    def stopped(self: OutputFile, found: Any) -> None:
        found = list(found)
        if found and self.done and self.done not in stops:
            stops.append(self.done)
            raise KeyboardInterrupt
        add(self, found)

    monkeypatch.setattr(job, "CHUNK", 1)
    monkeypatch.setattr(OutputFile, "add", stopped)
    for _ in range(9):
        if forge("infer", "runs/first", "--data", "texts.jsonl", "--out", out, *WINDOWS).code == 0:
            break
    assert len(stops) > 2
    assert 4 in stops, "inside the record of eight windows"
    assert out.read_bytes() == (tmp_path / f"whole.{suffix}").read_bytes()


def test_tokens_of_completions(tmp_path: Path) -> None:
    pairs = [("def f(", "x):"), ("a b ", "ç"), ("class\n", " A")]
    data = heads_data.write(tmp_path / "p.jsonl", ({"prompt": p, "completion": c} for p, c in pairs))
    found = infer(tmp_path / "out.jsonl", "--outputs", "per_token,log_likelihood", data=data)
    assert [bytes(one["token_ids"]).decode() for one in found] == ["x):", " ç", "\n A"]
    assert [one["token_offsets"] for one in found] == [
        [[6, 7], [7, 8], [8, 9]],
        [[3, 4], [4, 5], [4, 5]],  # two bytes of one character
        [[5, 6], [6, 7], [7, 8]],
    ]
    for one in found:
        assert sum(one["token_log_probabilities"]) == pytest.approx(one["log_likelihood"], rel=1e-6)
    infer(tmp_path / "out.parquet", "--outputs", "per_token", data=data)
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.column("token_ids").to_pylist() == [one["token_ids"] for one in found]
    assert table.column("token_offsets").to_pylist() == [one["token_offsets"] for one in found]
    assert [str(table.schema.field(n).type).replace("element", "item") for n in ("token_ids", "token_offsets")] == [
        "list<item: int32>",
        "list<item: list<item: int32>>",
    ]


def test_bad_input(tmp_path: Path) -> None:
    def said(*more: object, data: object = "texts.jsonl", out: str = "out.jsonl") -> str:
        return one_message(forge("infer", "runs/first", "--data", data, "--out", tmp_path / out, *more), 2)

    assert "--long windows: hidden is of a record as a whole" in said("--long", "windows", "--outputs", "hidden")
    assert "per_token gives lists of many lengths" in said("--outputs", "per_token", out="out.safetensors")
    prompt = heads_data.write(tmp_path / "long.jsonl", [{"prompt": "a" * 70, "completion": "b"}])
    assert "Only texts are read in windows." in said("--long", "windows", data=prompt)
    assert not [file for file in tmp_path.iterdir() if file.name.startswith("out")]
