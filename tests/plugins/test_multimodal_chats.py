"""Chats with items: as a processor of transformers has them, of every shape, and what is told of mistakes."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

import chat_model
from forge_train import MASKED, Batch, ConfigError
from forge_train_kit.data.plugin import Prefetch
from forge_train_plugins.data.sft import SFT
from items_data import Scan, encoded, job, same, scan, write_records, write_scans

pytest.importorskip("transformers")
pytestmark = [pytest.mark.unit]

PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
PARTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'scan' %}<|open|><scan><|close|>{% elif c.type == 'text' %}{{ c.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}" + PROMPT
)
"""A template in the manner of Qwen2-VL."""
FIRST = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% for c in m.content if c.type == 'scan' %}{{ '<scan>\n' }}{% endfor %}"
    "{% for c in m.content if c.type == 'text' %}{{ c.text }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}" + PROMPT
)
"""In the manner of LLaVA, which writes items first."""
SPECIAL = [*chat_model.SPECIAL, "<|open|>", "<|close|>"]
SIZES = (2, 3)


def folder(here: Path, template: str = PARTS, *, native: bool = True) -> Path:
    chat_model.write_tokenizer(here / "hf", template, [*SPECIAL, "<scan>"] if native else SPECIAL)
    write_scans(here, SIZES)
    return here


def sft(here: Path, *records: object, **options: Any) -> SFT:
    file = write_records(here / "chats.jsonl", records)
    return SFT(SFT.Config(**{"path": str(file), "cache": str(here / "cache"), "held_out": 0.0, **options}))


def run(here: Path, *modalities: Scan, **more: Any) -> Any:
    return job(*modalities, path=str(here / "hf"), **{"sequence": 64, "micro_batch": 1, **more})


def batch_of(here: Path, *records: object, **options: Any) -> Batch:
    return next(sft(here, *records, **options).build_data(run(here), "train"))


def url(number: int) -> str:
    return f"data:application/x-npy;base64,{base64.b64encode(encoded(scan(number, SIZES[number]))).decode()}"


def said(*parts: object, answer: str = "one two") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts]}, {"role": "assistant", "content": answer}]}


OPENAI = said(
    {"type": "scan_url", "scan_url": {"url": url(0)}},
    {"type": "text", "text": "say 3 "},
    {"type": "scan", "scan": "1.npy"},
)


@pytest.mark.parametrize(("template", "native"), [(PARTS, True), (PARTS, False), (FIRST, True)])
def test_tokens_are_those_of_transformers_with_items_in_place(tmp_path: Path, template: str, native: bool) -> None:
    from transformers import AutoTokenizer

    first = {"type": "scan", "path": "0.npy"}
    asked = said(first, {"type": "text", "text": "say 3"})
    batch = batch_of(folder(tmp_path, template, native=native), asked)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = tokenizer.apply_chat_template(_parts(asked), tokenize=False)
    before, after = text.split("<scan>")
    fill = [tokenizer.convert_tokens_to_ids("<scan>") if native else tokenizer.eos_token_id]
    ids = [*tokenizer(before)["input_ids"], *fill * SIZES[0], *tokenizer(after)["input_ids"]]
    assert batch.inputs[0, : len(ids)].tolist() == ids
    learned = [int(id) for id in batch.labels[0] if id != MASKED]
    assert tokenizer.decode(learned) == "one two<|im_end|>"
    start = len(tokenizer(before)["input_ids"])
    assert batch.extras["scan_places"][0].nonzero().min() >= 0
    assert batch.extras["scan_places"][0, start - 1 : start + 3].tolist() == [-1, 0, 1, -1]


def _parts(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages with lists of parts only."""
    return [
        {**one, "content": [{"type": "text", "text": text}] if isinstance(text := one["content"], str) else text}
        for one in record["messages"]
    ]


TEXT = {"type": "text", "text": "say 3 "}
MARKED = "<scan>say 3 <scan>"
BOTH = {"scans": ["0.npy", "1.npy"]}
TURNS = [{"from": "human", "value": MARKED}, {"from": "gpt", "value": "one two"}]
INSIDE = {"type": "input_scan", "input_scan": {"data": url(0).partition(",")[2], "format": "npy"}}
SHAPES = (
    said({"type": "scan"}, TEXT, {"type": "scan"}) | BOTH,
    said({"type": "text", "text": MARKED}) | {"scans": ["0.npy", {"path": "1.npy"}]},
    said(INSIDE, TEXT, {"type": "scan", "url": "1.npy"}),
    said({"type": "scan", "base64": url(0).partition(",")[2]}, TEXT, {"type": "scan"}) | {"scan": "1.npy"},
    {"conversations": TURNS, "scan": ["0.npy", "1.npy"]},
    {"prompt": MARKED, "completion": "one two", **BOTH},
    {"instruction": MARKED, "output": "one two", **BOTH},
    {"prompt": OPENAI["messages"][:1], "completion": "one two"},
)


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_every_shape_gives_the_same_batch(tmp_path: Path, shape: int) -> None:
    here = folder(tmp_path)
    expected = batch_of(here, OPENAI)
    assert expected.extras["scan_grids"][0].tolist() == [[1, 1, 2], [1, 1, 3]]
    assert same(batch_of(here, SHAPES[shape]), expected)


def test_parts_of_a_table_are_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    here = folder(tmp_path)
    scans = [{"bytes": encoded(scan(0, 2)), "path": "x.npy"}, {"bytes": encoded(scan(1, 3)), "path": None}]
    record = {"messages": _parts(SHAPES[0]), "scans": scans}
    parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / "chats.parquet")
    table = sft(here, OPENAI, path=str(tmp_path / "chats.parquet")).build_data(run(here), "train")
    assert same(next(table), batch_of(here, OPENAI))


def test_each_turn_has_the_items_up_to_it(tmp_path: Path) -> None:
    here = folder(tmp_path)
    turns = [
        {"role": "user", "content": [{"type": "scan", "scan": "0.npy"}]},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "<scan>say 2"},
        {"role": "assistant", "content": "two"},
    ]
    plugin = sft(here, {"messages": turns, "scan": "1.npy"}, each_turn=True, packing="pad", shuffle=False)
    loader = plugin.build_data(run(here), "train")
    found = [next(loader).extras["scan_grids"][0].tolist() for _ in range(2)]
    assert found == [[[1, 1, 2]], [[1, 1, 2], [1, 1, 3]]]


def test_items_may_lie_in_another_folder(tmp_path: Path) -> None:
    here = folder(tmp_path)
    write_scans(tmp_path / "else" / "where", SIZES)
    record = {**SHAPES[1], "scans": ["where/0.npy", "where/1.npy"]}
    assert same(batch_of(here, record, items=str(tmp_path / "else")), batch_of(here, OPENAI))
    with pytest.raises(ConfigError, match=r"sft\.items: .*/nowhere is no folder"):
        batch_of(here, record, items=str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (
            said({"type": "clip", "clip": "a"}),
            "messages[0]: content has a part of type 'clip'; this run reads text",
        ),
        (said({"type": "scan"}), "the text has 1 placeholder <scan> for 0 scans; write one for each."),
        (said({"type": "text", "text": "<scan>"}), "the text has 1 placeholder <scan> for 0 scans"),
        (
            said({"type": "text", "text": "a"}) | {"scan": "0.npy"},
            "the text has 0 placeholders <scan> for 1 scan;",
        ),
        (said({"type": "scan", "scan": "no.npy"}), "no.npy: No such file or directory."),
        (said({"type": "text", "text": "<scan>"}) | {"scnas": ["0.npy"]}, "under 'scnas'. Did you mean 'scans'?"),
        ({"text": "<scan>a", "scans": ["0.npy"]}, "its fields (text) are no conversation's"),
        (said({"type": "text", "text": "a"}, answer="<scan>"), "the text has 1 placeholder <scan> for 0 scans"),
    ],
)
def test_a_mistake_is_told_by_file_and_line(tmp_path: Path, record: object, says: str) -> None:
    here = folder(tmp_path)
    with pytest.raises(ConfigError) as error:
        batch_of(here, OPENAI, record)
    assert f"{tmp_path / 'chats.jsonl'}, line 2" in str(error.value)
    assert says in str(error.value)


def test_options_that_items_do_not_take_are_refused(tmp_path: Path) -> None:
    here = folder(tmp_path)
    with pytest.raises(ConfigError, match=r"sft\.packing: 'buckets' does not count items"):
        batch_of(here, OPENAI, packing="buckets")
    with pytest.raises(ConfigError, match=r"sft\.split_special_tokens: placeholders of items are special tokens"):
        batch_of(here, OPENAI, split_special_tokens=True)
    none = run(here)
    none.hooks.call = lambda spec, arguments: []
    with pytest.raises(ConfigError, match=r"sft\.items: has no effect: no enabled plugin gives a modality"):
        sft(here, OPENAI, items=str(here)).build_data(none, "train")
    with pytest.raises(
        ConfigError, match=r"sft\.prefetch\.on_error: 'replace' is for items, and no enabled plugin gives"
    ):
        sft(here, OPENAI, prefetch=Prefetch(on_error="replace")).build_data(none, "train")


def test_items_of_messages_go_with_other_fields(tmp_path: Path) -> None:
    here = folder(tmp_path)
    asked = said({"type": "scan", "scan": "0.npy"}) | {"scan_file": "elsewhere/0.npy"}
    assert batch_of(here, asked).extras["scan_grids"][0].tolist() == [[1, 1, 2]]
