"""Formats: records of files that real libraries wrote, parts, and what a broken file is told."""

from __future__ import annotations

import gzip
import itertools
import json
import re
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from crossed import marked
from forge_train import ConfigError
from forge_train_kit.data.files import File, find
from forge_train_kit.data.formats import Part, lookup, text_of
from forge_train_plugins.data import arrow, jsonl
from test_text_corpus import texts
from text_fakes import job, plugin

pytestmark = [pytest.mark.unit]

RECORDS = [{"text": f"täxt {n}\n" + "x" * (n % 13), "n": n, "tags": ["a", None]} for n in range(2_500)]


def read(file: File | Path) -> list[dict[str, Any]]:
    """All records, part by part."""
    file = file if isinstance(file, File) else File(str(file))
    form = lookup(file.suffix, file.label)
    parts = form.parts(file)
    for part in parts:
        if part.records is not None:
            assert part.records == sum(1 for _ in form.read(file, part))
    return [dict(record) for part in parts for _, record in form.read(file, part)]


def places(path: Path) -> list[str]:
    file = File(str(path))
    form = lookup(file.suffix, "")
    return [place for part in form.parts(file) for place, _ in form.read(file, part)]


# -- writers, of the libraries that people use --------------------------------------------------------


def write_jsonl(path: Path) -> None:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS), encoding="utf-8")


def write_json(path: Path) -> None:
    path.write_text(json.dumps(RECORDS, indent=1))


def write_parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(RECORDS), path, row_group_size=700)


def write_ipc_file(path: Path) -> None:
    table = pa.Table.from_pylist(RECORDS)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=300)


def write_ipc_stream(path: Path) -> None:
    table = pa.Table.from_pylist(RECORDS)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=300)


def write_csv(path: Path) -> None:
    import csv

    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, RECORDS[0], delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(RECORDS)


Writer = Callable[[Path], None]
WRITERS: dict[str, Writer] = {
    "a.jsonl": write_jsonl,
    "a.ndjson": write_jsonl,
    "a.json": write_json,
    "a.parquet": write_parquet,
    "file.arrow": write_ipc_file,
    "stream.arrow": write_ipc_stream,
    "a.csv": write_csv,
    "a.tsv": write_csv,
}


def pack(path: Path, packed: str) -> Path:
    data = path.read_bytes()
    target = path.with_name(f"{path.name}.{packed}")
    half = len(data) // 2
    if packed == "gz":
        target.write_bytes(gzip.compress(data[:half]) + gzip.compress(data[half:]))
    else:
        one = zstandard.ZstdCompressor()
        target.write_bytes(one.compress(data[:half]) + one.compress(data[half:]))
    return target


@pytest.mark.parametrize("packed", ["", "gz", "zst"])
@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_records_in_order(
    tmp_path: Path, name: str, packed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "_PART", 10_000)
    monkeypatch.setattr(arrow, "_PART", 10_000)
    path = tmp_path / name
    WRITERS[name](path)
    path = pack(path, packed) if packed else path
    expected: Any = RECORDS
    if name in ("a.csv", "a.tsv"):
        expected = [{key: str(value) for key, value in record.items()} for record in RECORDS]
    assert read(path) == expected
    parts = lookup(File(str(path)).suffix, "").parts(File(str(path)))
    if not packed and name not in ("a.json", "a.csv", "a.tsv"):
        assert len(parts) > 3
    assert len(set(places(path))) == len(RECORDS), "each record has its own place"


def test_rows_count_from_the_beginning_of_the_file(tmp_path: Path) -> None:
    for name, writer in (("a.parquet", write_parquet), ("file.arrow", write_ipc_file)):
        writer(tmp_path / name)
        assert places(tmp_path / name) == [f"row {n + 1}" for n in range(len(RECORDS))]


def test_a_folder_that_datasets_saved(tmp_path: Path) -> None:
    saved = datasets.Dataset.from_list(RECORDS)
    saved.save_to_disk(str(tmp_path / "one"), num_shards=3)
    assert (tmp_path / "one" / "state.json").exists()
    files = find(str(tmp_path / "one"), key="k")
    assert [file.suffix for file in files] == ["arrow"] * 3
    assert [record for file in files for record in read(file)] == RECORDS
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(str(tmp_path / "two"))
    with pytest.raises(ConfigError, match=r"k: '.*two' holds the splits 'test', 'train': name one, as in '.*two/test'"):
        find(str(tmp_path / "two"), key="k")
    assert len(find(str(tmp_path / "two" / "train"), key="k")) == 1


@pytest.mark.slow
@given(
    lines=st.lists(st.tuples(st.integers(0, 80), st.sampled_from(["\n", "\r\n", "\n\n", "\n  \n"])), max_size=40),
    size=st.integers(1, 200),
    ended=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_parts_have_every_line_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, lines: list[tuple[int, str]], size: int, ended: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "lines.jsonl"
    data = "".join(json.dumps({"n": n, "text": "x" * length}) + end for n, (length, end) in enumerate(lines))
    path.write_bytes((data if ended else data.rstrip()).encode())
    file, form = File(str(path)), jsonl.Lines()
    length = file.size()
    cuts = [*range(0, length, size), length]
    found = [
        record["n"] for start, stop in itertools.pairwise(cuts) for _, record in form.read(file, Part(start, stop, 0))
    ]
    assert found == [*range(len(lines))]


# -- broken files ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.jsonl", r"a\.jsonl, line \d+: not JSON \(.*\); the file ends in this line$"),
        ("a.json", r"a\.json: not JSON \(.*\)$"),
        ("a.parquet", r"a\.parquet is cut off, damaged or no Parquet file \(.*\)$"),
        ("file.arrow", r"file\.arrow is cut off, damaged or no Arrow file \(.*\)$"),
        ("stream.arrow", r"stream\.arrow, record batch \d is cut off, damaged or no Arrow file \(.*\)$"),
        ("a.csv", r"a\.csv, line \d+: "),
        ("a.tsv", r"a\.tsv, line \d+: "),
    ],
)
@pytest.mark.parametrize("packed", ["", "gz", "zst"])
def test_a_file_that_is_cut_is_named_with_the_place(tmp_path: Path, name: str, message: str, packed: str) -> None:
    path = tmp_path / name
    WRITERS[name](path)
    path = pack(path, packed) if packed else path
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    if packed:
        message = (
            rf"a?.*\.{packed} is cut off or damaged: it can't be unpacked beyond byte [\d,]+ of its content \(.*\)$"
        )
    with pytest.raises(ConfigError, match=message) as error:
        read(File(str(path), key="text.path"))
    assert str(error.value).startswith(f"text.path: {path}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(
    "content", [b"\x00\xff\x01" * 999, b"PAR1" + b"\xfe" * 500 + b"PAR1", b"<html>no</html>\n,,\n\t\t\n"]
)
def test_a_file_of_another_kind_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^{re.escape(str(path))}"):
        read(path)
    for packed in ("gz", "zst"):
        path.with_name(f"{name}.{packed}").write_bytes(content)
        with pytest.raises(ConfigError, match=rf"\.{packed} is cut off or damaged: .* byte 0 of its content"):
            read(path.with_name(f"{name}.{packed}"))


def test_a_damaged_page_is_named_with_its_row_group(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(RECORDS), path, row_group_size=1_000, write_page_checksum=True)
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    begin = column.dictionary_page_offset or column.data_page_offset
    data[begin : begin + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"a\.parquet, row group 2 is cut off, damaged or no Parquet file"):
        read(path)


def test_a_broken_line_of_a_later_part_has_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "_PART", 100)
    path = tmp_path / "a.jsonl"
    for wrong, message in (("{", "not JSON"), ("[1]", "not an object but a list")):
        path.write_text('{"text": "a"}\n\n' * 40 + f"{wrong}\n" + '{"text": "b"}\n')
        with pytest.raises(ConfigError, match=rf"a\.jsonl, line 81: {message}"):
            read(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", '{"text": "a"}\n{"text": "b"}\n', r"not an array: a \.json file is read if .* is \.jsonl"),
        ("a.json", '{"text": "a"}', r"not an array but a dict: "),
        ("a.jsonl", '[\n  {"text": "a"}\n]\n', r"line 1: not JSON \(.*\); a file with one array .* ends in \.json$"),
        ("a.jsonl", '[{"text": "a"}]\n', r"line 1: not an object but a list; a file with one array .* in \.json$"),
        ("a.jsonl", '{"text": "a"}\n{"text":\n', r"line 2: not JSON \(Expecting value at character 10\)$"),
        ("a.json", '[{"text": "a"}, 5]', r"element 2: not an object but a int"),
        ("a.csv", "text,n\na,1\nb\n", r"line 3: 1 fields, where the header has 2"),
        ("a.csv", "text,n,text\n", r"line 1: two fields are named 'text'"),
        ("a.csv", 'text,n\n"a,1\n\nb,2\n', r"line 2: unexpected end of data"),
    ],
)
def test_what_a_format_does_not_read(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / name)


def test_csv_as_spreadsheets_write_it(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    long = "x" * 200_000
    path.write_bytes(b"\xef\xbb\xbf" + f'text,n\r\n"a ""b"", c\r\nd",1\r\n\r\n{long},2\r\n'.encode())
    assert read(path) == [{"text": 'a "b", c\r\nd', "n": "1"}, {"text": long, "n": "2"}]
    assert places(path) == ["line 2", "line 5"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    marked(
        ["a.jsonl", "a.parquet", "stream.arrow", "a.csv", "a.jsonl.zst", "a.jsonl.gz"],
        ["a.jsonl", "a.jsonl.gz", "a.csv"],
    ),
)
def test_memory_is_bounded_whatever_the_size(tmp_path: Path, name: str) -> None:
    table = pa.table({"text": ["x" * 1000] * 60_000, "n": ["y" * 500] * 60_000})
    path = tmp_path / name.removesuffix(".zst").removesuffix(".gz")
    if "parquet" in name:
        pq.write_table(table, path, use_dictionary=False, compression="none")
    elif "arrow" in name:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=1_000)
    elif "csv" in name:
        path.write_text("text,n\n" + ("x" * 1000 + "," + "y" * 500 + "\n") * 60_000)
    else:
        path.write_text((json.dumps({"text": "x" * 1000, "n": "y" * 500}) + "\n") * 60_000)
    if name.endswith(("gz", "zst")):
        path = pack(path, name.rpartition(".")[2])
    file = File(str(path))
    form = lookup(file.suffix, "")
    usual = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(usual)
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        count = sum(len(record["text"]) for part in form.parts(file) for _, record in form.read(file, part))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(usual)
    assert count == 60_000_000
    assert peak + pool.max_memory() < 16e6, "of 90 MB"
    assert pool.max_memory() > 0 or "parquet" not in name, "pyarrow's memory is counted"


# -- which format ---------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["pyarrow", "zstandard"])
def test_a_missing_package_is_one_sentence(tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path)
    path = path if module == "pyarrow" else pack(path, "zst")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ConfigError, match=rf"^.*parquet\S* needs {module} to be read: pip install 'forge-train\[data\]'$"
    ):
        read(path)


def test_text_of() -> None:
    assert text_of({"a": "b"}, "a", "x, row 1", "k") == "b"
    for record, has in (({"b": 1, "c": 2}, "has 'b', 'c'"), ({"a": [1]}, r"has \[1\] there"), ({}, "is empty")):
        with pytest.raises(ConfigError, match=rf"^x, row 1: no string under 'a' \(k\); the record {has}$"):
            text_of(record, "a", "x, row 1", "k")


# -- the text plugin ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*WRITERS, "a.jsonl.gz", "a.parquet.zst"])
def test_text_reads_every_format(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "README.md").write_text("# about")
    bare = name.removesuffix(".gz").removesuffix(".zst")
    WRITERS[bare](folder / bare)
    if bare != name:
        pack(folder / bare, name.rpartition(".")[2])
        (folder / bare).unlink()
    for path in (folder, folder / "*", folder / name):
        found = plugin(tmp_path / "cache", path, held_out=0.0)._open(job())
        assert texts(found.train) == [record["text"] for record in RECORDS]
    with pytest.raises(
        ConfigError, match=r"^text\.path: .*: no string under 'body' \(text\.field\); .* has 'text', 'n'"
    ):
        plugin(tmp_path / "cache", folder, field="body")._open(job())


def test_a_packed_corpus_is_the_same_corpus(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl")
    corpora = [
        plugin(tmp_path / "cache", path)._open(job())
        for path in (tmp_path / "a.jsonl", pack(tmp_path / "a.jsonl", "gz"), pack(tmp_path / "a.jsonl", "zst"))
    ]
    assert len({corpus.key for corpus in corpora}) == 1
    assert len(corpora[0].validation.ends) > 20, "whole documents are held out"
