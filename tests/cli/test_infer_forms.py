"""`forge infer` into Parquet and safetensors: what the lines of JSON say, whatever interrupted it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

import forge_cli
import full_disk
import heads_data
from forge_cli import forge, one_message
from forge_train_tools.inference.forms import form_of

SETTINGS = forge_cli.DECODER.replace("layers = 1", "layers = 2")
ASKED = ("--outputs", "log_likelihood,hidden,layers.0.hidden_mean", "--long", "left", "--batch", "3")


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of a language model, and texts of many lengths, of which one is cut."""
    folder = tmp_path_factory.mktemp("forms")
    (folder / "mine.toml").write_text(SETTINGS + '[text]\npath = "texts.jsonl"\n', encoding="utf-8")
    texts = [passage[: 3 + 7 * at % 50] for at, passage in enumerate(heads_data.passages("json", 40))]
    texts[7] = "long" * 20
    heads_data.write(folder / "texts.jsonl", ({"id": f"t{at}", "text": text} for at, text in enumerate(texts)))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        ended = forge("train", "mine.toml", "--name", "first", "--quiet")
        assert ended.code == 0, ended.err
        infer(folder / "lines.jsonl")
    return folder


@pytest.fixture(autouse=True)
def here(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)


def infer(out: Path, *more: object, asked: Sequence[str] = ASKED) -> Path:
    ended = forge("infer", "runs/first", "--data", "texts.jsonl", "--out", out, *asked, *more)
    assert ended.code == 0, ended.err
    return out


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def as_fp32(line: dict[str, Any]) -> dict[str, Any]:
    return {k: np.float32(v).tolist() if isinstance(v, (float, list)) else v for k, v in line.items()}


def test_rows_of_parquet_are_the_lines(tmp_path: Path) -> None:
    table = pq.read_table(infer(tmp_path / "out.parquet"))
    expected = [{"cut": None} | as_fp32(line) for line in lines(Path("lines.jsonl"))]
    assert table.to_pylist() == expected
    assert [str(table.schema.field(name).type) for name in ("record", "id", "log_likelihood", "tokens", "cut")] == [
        *("int64", "string", "float", "int64", "int64")
    ]
    assert str(table.schema.field("hidden").type).startswith("list<")
    assert "float" in str(table.schema.field("hidden"))


def test_rows_of_tensors_are_the_lines(tmp_path: Path) -> None:
    found = load_file(infer(tmp_path / "out.safetensors"))
    expected = lines(Path("lines.jsonl"))
    assert found.keys() == {"record", "log_likelihood", "tokens", "hidden", "layers.0.hidden_mean", "cut"}
    assert {name: one.dtype.name for name, one in found.items() if one.dtype != np.float32} == dict.fromkeys(
        ("record", "tokens", "cut"), "int64"
    )
    for name, one in found.items():
        theirs = np.array([line.get(name, 0) for line in expected])
        assert one.shape == theirs.shape
        assert np.array_equal(one, theirs.astype(one.dtype)), name
    assert found["cut"][7] == 16


@pytest.mark.parametrize("suffix", ["parquet", "safetensors"])
def test_nothing_that_interrupts_it_changes_a_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """A full disk, a half written record, and reading in other pieces; with several row groups."""
    from forge_train_tools.inference import columns
    from forge_train_tools.inference import infer as job
    from forge_train_tools.inference.output_file import OutputFile

    monkeypatch.setattr(columns, "BLOCK", 3000)
    whole = infer(tmp_path / f"whole.{suffix}")
    out, add = tmp_path / f"out.{suffix}", OutputFile.add

    def until_full(self: OutputFile, found: Any) -> None:
        with full_disk.full_for(*["records.packed"] * (self.done >= 18)):
            add(self, found)

    with monkeypatch.context() as patch:
        patch.setattr(job, "CHUNK", 2)
        patch.setattr(OutputFile, "add", until_full)
        said = one_message(forge("infer", "runs/first", "--data", "texts.jsonl", "--out", out, *ASKED), 1)
    assert "No space left on device" in said
    with (tmp_path / f"out.{suffix}.partial" / "records.packed").open("ab") as file:
        file.write(b"\x20\0\0\0half")
    with full_disk.full_for(f"whole.{suffix}") if suffix == "safetensors" else monkeypatch.context():
        ended = forge("infer", "runs/first", "--data", "texts.jsonl", "--out", out, *ASKED)
    if suffix == "safetensors":
        assert "No space left on device" in one_message(ended, 1)
        assert not out.exists()
        infer(out)
    assert out.read_bytes() == whole.read_bytes()
    assert not out.with_name(f"{out.name}.partial").exists()
    if suffix == "parquet":
        assert pq.ParquetFile(out).num_row_groups > 3


def packed(suffix: str, folder: Path, *records: dict[str, Any]) -> Path:
    form = form_of(folder / f"out.{suffix}")
    file = folder / form.file
    file.write_bytes(b"".join(map(form.packed, records)))
    return form.finished(file)


@pytest.mark.parametrize(
    ("values", "type", "found"),
    [
        ([1, 2, None], "int64", [1, 2, None]),
        ([1, 2.5], "double", [1.0, 2.5]),
        ([7, "a1", None, {"b": 2}], "string", ["7", "a1", None, '{"b": 2}']),
        ([{"a": 0.5}, {"a": 1.0}], "struct<a: double>", [{"a": 0.5}, {"a": 1.0}]),
        ([["x"], []], "list<item: string>", [["x"], []]),
    ],
)
def test_types_of_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: list[Any], type: str, found: list[Any]
) -> None:
    """Within a block, and over several."""
    from forge_train_tools.inference import columns

    for size in (columns.BLOCK, 1):
        monkeypatch.setattr(columns, "BLOCK", size)
        file = packed("parquet", tmp_path, *({"record": at, "value": value} for at, value in enumerate(values)))
        column = pq.read_table(file).column("value")
        assert str(column.type).replace("element", "item") == type
        assert column.to_pylist() == found


def test_numbers_of_objects_are_tensors(tmp_path: Path) -> None:
    each = [{"record": at, "id": "x", "shares": {"a": 0.25, "b": 0.75}, "pair": [1, at]} for at in range(3)]
    found = load_file(packed("safetensors", tmp_path, *each))
    assert found["shares.b"].tolist() == [0.75] * 3
    assert found["pair"].tolist() == [[1, 0], [1, 1], [1, 2]]
    assert found.keys() == {"record", "shares.a", "shares.b", "pair"}


def test_what_is_no_tensor_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    for record, said in (
        ({"class": "json"}, "'class' is no number"),
        ({"lists": [[1], [2, 3]]}, "'lists' is no number"),
    ):
        with pytest.raises(Exception, match=said):
            form_of(out).packed(record)
    form = form_of(out)
    form.packed({"ids": [1, 2]})
    with pytest.raises(Exception, match=r"'ids' has the shapes \[2\] and \[3\]"):
        form.packed({"ids": [1, 2, 3]})


def test_other_suffixes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(name: str) -> str:
        return one_message(forge("infer", "runs/first", "--data", "texts.jsonl", "--out", tmp_path / name), 2)

    assert "expected a name that ends with .jsonl, .parquet or .safetensors" in said("out.csv")
    monkeypatch.setattr("forge_train_tools.inference.parquet.find_spec", lambda name: None)
    assert "needs pyarrow to be written: pip install" in said("out.parquet")
    assert not any(tmp_path.iterdir())
