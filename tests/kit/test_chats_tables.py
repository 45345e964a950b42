"""Conversations of tables: alike from JSON Lines, Parquet, Arrow and CSV."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from forge_train import ConfigError
from forge_train_kit.data.chats import conversation
from forge_train_kit.data.files import find
from forge_train_kit.data.formats import lookup

pa = pytest.importorskip("pyarrow")
pytestmark = [pytest.mark.unit]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}


def chat(call: dict[str, Any], tools: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": call}}]},
            {"role": "tool", "content": "3"},
            {"role": "assistant", "content": "b"},
        ],
        "tools": tools,
    }


RECORDS = [
    chat({"x": 1, "deep": {"u": [{"p": 1}, {"q": 2}]}}, [tool("f", x={"type": "integer"})]),
    chat({"y": "two", "deep": {"v": None}}, [tool("g", y={"type": "string", "default": None}), tool("f")]),
]


def read(path: Path) -> list[Any]:
    file = find((str(path),), key="path")[0]
    reader = lookup(file.suffix, file.label)
    found = [conversation(record) for part in reader.parts(file) for _, record in reader.read(file, part)]
    return [(one.messages, one.tools) for one in found]


def strings(record: dict[str, Any]) -> dict[str, str]:
    return {name: json.dumps(value) for name, value in record.items()}


def test_the_same_records_are_alike_from_every_format(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    jsonl = tmp_path / "a.jsonl"
    jsonl.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    table = pa.Table.from_pylist(RECORDS)
    pq.write_table(table, tmp_path / "b.parquet")
    with pa.ipc.new_file(tmp_path / "c.arrow", table.schema) as file:
        file.write_table(table)
    with (tmp_path / "d.csv").open("w", newline="") as out:
        rows = csv.DictWriter(out, ["prompt", "messages", "tools"], restval="")
        rows.writeheader()
        rows.writerows(map(strings, RECORDS))
    expected = read(jsonl)
    assert expected[1][0][1]["tool_calls"][0]["function"]["arguments"] == {"y": "two", "deep": {}}
    assert json.dumps(expected).count("null") == 0
    for name in ("b.parquet", "c.arrow", "d.csv"):
        assert read(tmp_path / name) == expected, name


def write_all(folder: Path, records: list[dict[str, Any]], table: Any) -> list[Path]:
    """The same records in each format."""
    import pyarrow.parquet as pq

    paths = [folder / f"w.{suffix}" for suffix in ("jsonl", "parquet", "arrow", "csv")]
    paths[0].write_text("".join(json.dumps(record) + "\n" for record in records))
    pq.write_table(table, paths[1])
    with pa.ipc.new_file(paths[2], table.schema) as file:
        file.write_table(table)
    with paths[3].open("w", newline="") as out:
        rows = csv.DictWriter(out, [*records[0]], restval="")
        rows.writeheader()
        rows.writerows({name: value if isinstance(value, str) else json.dumps(value) for name, value in record.items()}
                       for record in records)  # fmt: skip
    return paths


def test_weights_are_alike_from_every_format(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0.5}]
    record = {"messages": messages, "weight": 1}
    for kind in (pa.float64(), pa.float32(), pa.float16(), pa.decimal128(22, 2)):
        message = pa.struct({"role": pa.string(), "content": pa.string(), "weight": kind})
        rows = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "weight": pa.scalar(0.5).cast(kind).as_py()},
        ]
        table = pa.table({"messages": pa.array([rows], pa.list_(message)), "weight": pa.array([1]).cast(kind)})
        for path in write_all(tmp_path, [record], table):
            ((found, _),) = read(path)
            assert found[1]["weight"] == 0.5, (kind, path)


@pytest.mark.parametrize(
    ("name", "value"), [("weight", 0), ("weight", 0.5), ("train", False), ("training", 0), ("loss_mask", False)]
)
def test_a_flag_of_a_whole_record_is_refused_from_every_format(tmp_path: Path, name: str, value: object) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    records = [{"messages": messages, name: value}]
    for path in write_all(tmp_path, records, pa.Table.from_pylist(records)):
        with pytest.raises(ConfigError, match=f"{name} of a whole record is not read"):
            read(path)
    if type(value) is not bool:
        decimals = pa.table({"messages": [messages], name: pa.array([value]).cast(pa.decimal128(22, 2))})
        for path in write_all(tmp_path, records, decimals)[1:3]:
            with pytest.raises(ConfigError, match=f"{name} of a whole record is not read"):
                read(path)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_values_of_the_json_type_are_values(tmp_path: Path, suffix: str) -> None:
    datasets = pytest.importorskip("datasets")
    if not hasattr(datasets, "Json"):
        pytest.skip("this version of datasets has no type Json")
    for name, features in (
        ("whole", {"messages": datasets.Json(), "tools": datasets.Json()}),
        ("each", {"messages": datasets.List(datasets.Json()), "tools": datasets.List(datasets.Json())}),
    ):
        table = datasets.Dataset.from_list(RECORDS, features=datasets.Features(features))
        path = tmp_path / f"{name}.{suffix}"
        if suffix == "parquet":
            table.to_parquet(path)
        else:
            with pa.ipc.new_file(path, table.data.table.schema) as file:
                file.write_table(table.data.table)
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
        assert read(path) == read(tmp_path / "a.jsonl"), name


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}, json.dumps('{"a": 1}')])
def test_arguments_in_a_string_are_an_object(arguments: Any) -> None:
    function = {"name": "f", "arguments": arguments}
    user = {"role": "user", "content": "a"}
    for turn in (
        {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "assistant", "function_call": function},
        {"from": "function_call", "value": json.dumps(function)},
    ):
        said = {"from": "human", "value": "a"} if "from" in turn else user
        found = conversation({"messages": [said, turn, {"from": "observation", "value": "1"}][: 2 + ("from" in turn)]})
        assert found.messages[1]["tool_calls"] == [
            {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
        ]
        assert [one["role"] for one in found.messages[2:]] == (["tool"] if "from" in turn else [])


def test_parameters_of_a_tool_in_a_string_are_an_object() -> None:
    parameters = {"type": "object", "properties": {"x": {"type": "integer"}}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for given in (parameters, json.dumps(parameters)):
        for schema in ({"name": "f", "parameters": given}, {"function": {"name": "f", "parameters": given}}):
            (found,) = conversation({"messages": messages, "tools": [schema]}).tools
            assert found.get("function", found)["parameters"] == parameters
