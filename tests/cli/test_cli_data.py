"""`forge data inspect` and `forge data show`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

import items_data
from forge_command import Forge

CHATS = [
    {"messages": [{"role": "user", "content": "<b>&amp;</b>"}, {"role": "assistant", "content": f"Yes {at} 😀"}]}
    for at in range(3)
]
OWN = """
from forge_train import Plugin, hookimpl


class Own(Plugin):
    api = (1, 0)

    @hookimpl
    def build_data(self, job, split): ...

    @hookimpl
    def data_stages(self, job):
        yield "pack", f"rows of {job.config.train.sequence}"
        yield "STAGE", "numbers"
"""


@pytest.fixture
def chats(folder: Path) -> Path:
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps(chat) + "\n" for chat in CHATS), encoding="utf-8")
    return file


class Page(HTMLParser):
    """What a page shows, and what it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_inspect_shows_samples_and_counts(forge: Forge, chats: Path) -> None:
    shown = forge("data", "inspect", "chats.jsonl", "--chat", "--template", "plain", "--samples", "1").out
    assert re.search(r"^documents +3$", shown, re.MULTILINE)
    assert "⟦U│s│e│r│:│ │<│b│>│&│a│m│p│;" in shown
    assert "A│s│s│i│s│t│a│n│t│:⟧ │Y│e│s│" in shown
    assert "│·│·│·│😀│" in shown
    assert "\x1b" not in shown
    data = forge("data", "inspect", "chats.jsonl", "--chat", "--template", "plain", "--json").json
    assert data["documents"] == 3
    assert len(data["samples"]) == 3
    learned = "".join(token["text"] for token in data["samples"][0]["tokens"] if token["learned"])
    assert learned.startswith(" Yes 0 😀")


def test_the_page_loads_nothing_and_escapes_everything(forge: Forge, chats: Path) -> None:
    assert (
        "Wrote x.html."
        in forge("data", "inspect", "chats.jsonl", "--chat", "--template", "plain", "--html", "x.html").out
    )
    text = Path("x.html").read_text(encoding="utf-8")
    page = Page(text)
    assert not {"b", "script", "link", "img"} & {tag for tag, _ in page.tags}
    assert not any({"src", "href"} & attributes.keys() for _, attributes in page.tags)
    assert "url(" not in text
    assert "<b>&amp;</b>" in page.text
    ids = [attributes["title"] for tag, attributes in page.tags if tag == "i"]
    assert bytes(int(id or 0) for id in ids if int(id or 0) < 256).decode().startswith("User: <b>&amp;</b>")
    assert any(attributes.get("class") == "u" for _, attributes in page.tags)


def test_a_damaged_shard_ends_with_1(forge: Forge, folder: Path) -> None:
    forge("data", "prepare", "corpus.txt", "--out", "out", "--held-out", "0.2", "--workers", "1")
    shown = forge("data", "inspect", "out").out
    assert "every shard holds what was written" in shown
    assert re.search(r"near: 0 of 2 documents", shown)
    shard = folder / "out" / "validation-00000.tokens"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert (
        "out/validation-00000.tokens: the content is not what was written"
        in forge("data", "inspect", "out", fails=1).err
    )
    shard.write_bytes(content[:-1])
    assert "truncated or damaged" in forge("data", "inspect", "out", fails=2).err


def stages(forge: Forge, *asked: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    without = ("--without", "text") if "-p" in asked else ()
    for one in forge("data", "show", "tiny.toml", *asked, *without, "--json").json:
        found.setdefault(one["stage"], []).append(one["text"])
    return found


@pytest.mark.slow
def test_show_follows_the_configuration(forge: Forge, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    for path in folder.iterdir():
        os.utime(path, (1, 1))  # what has just changed is not known by its time
    text = stages(forge)
    assert list(text) == ["source", "decode", "tokenise", "filter", "pack", "order", "batch"]
    assert "1 file (1 .txt)" in text["source"][0]
    assert text["batch"] == ["16 tokens × 2 sequences × 1 data ranks × 1 passes = 32 tokens a step; 6 steps"]
    assert "epoch" not in text["pack"][0]
    done = forge("train", "tiny.toml", "--json").json
    assert done["step"] == 6
    known = stages(forge, "-s", "train.global_batch=4", "-s", "text.shuffle=false", "--world", "2")
    assert (found := re.search(r"; ([\d,]+) sequences an epoch, (.*) epochs in this run", known["pack"][0]))
    assert float(found[2]) == round(6 * 4 / int(found[1].replace(",", "")), 2)
    assert known["order"] == ["as it lies in the files"]
    assert "2 sequences × 2 data ranks × 1 passes = 64 tokens" in known["batch"][0]


def test_show_counts_tokens(forge: Forge, folder: Path) -> None:
    lines = [json.dumps({"text": f"line {at} " * 20}) for at in range(100)]
    (folder / "docs.jsonl").write_text("\n".join(lines), encoding="utf-8")
    forge("data", "prepare", "docs.jsonl", "--out", "out", "--workers", "1", "--held-out", "0.2")
    known = forge("data", "inspect", "out", "--json").json["facts"]["train"]
    rows = stages(forge, "-p", "tokens", "-s", "tokens.path=out")
    assert f"out: {known['documents']:,} documents of {known['tokens']:,} tokens" in rows["source"][0]
    assert f"; {known['tokens'] // 16:,} sequences an epoch" in rows["pack"][0]
    padded = stages(
        forge, "-p", "tokens", "-s", "tokens.path=out", "-s", "tokens.packing=pad", "-s", "train.sequence=64"
    )
    assert "one document in a row of 64 tokens; attention stays in a document" in padded["pack"][0]
    sources = 'mixture.sources=[{path="out",weight=3},{path="out",name="b"}]'
    mixed = stages(forge, "-p", "mixture", "-s", sources)
    assert [text.partition(":")[0] for text in mixed["source"]] == [
        "out, 75.0% of the sequences",
        "b, 25.0% of the sequences",
    ]


def test_show_without_the_data(forge: Forge) -> None:
    assert "nowhere can't be read" in stages(forge, "-p", "tokens", "-s", "tokens.path=nowhere")["source"][0]
    assert "no such file" in stages(forge, "-s", "text.path=nowhere")["source"][0]


def test_show_of_chats(forge: Forge, chats: Path, folder: Path) -> None:
    options = ("-p", "sft", "-s", "sft.path=chats.jsonl", "-s", "sft.template=plain", "-s", f"sft.cache={folder}/c")
    found = stages(forge, *options, "-s", "sft.learn=last")
    assert found["render"] == ["chat template: plain; learned: last"]
    assert "1 file (1 .jsonl)" in found["source"][0]
    assert "conversations longer than a row: refuse" in found["filter"]


@pytest.mark.parametrize(("stage", "code"), [("source", 0), ("sauce", 1)])
def test_a_plugin_tells_its_own_stages(
    forge: Forge, folder: Path, distribution: Callable[..., Path], stage: str, code: int
) -> None:
    (folder / "own.py").write_text(OWN.replace("STAGE", stage), encoding="utf-8")
    ended = forge("data", "show", "tiny.toml", "-p", "./own.py:Own", "--without", "text", fails=code)
    if code:
        assert "there is no stage 'sauce'; stages are source, decode" in ended.err
        assert "hook data_stages (" in ended.err
    else:
        assert re.search(r"^source +numbers +own$", ended.out, re.MULTILINE)
        assert ended.out.index("numbers") < ended.out.index("rows of 16")


@pytest.mark.slow
def test_a_plugin_sees_the_ranks_that_are_asked_for(
    forge: Forge, folder: Path, distribution: Callable[..., Path]
) -> None:
    told = 'f"rank {job.dist.data_rank} of {job.dist.data_ranks}, {job.dist.layout.tp} of {job.dist.world}"'
    (folder / "own.py").write_text(OWN.replace('"numbers"', told).replace("STAGE", "batch"), encoding="utf-8")
    axes = ("-s", "parallel.tp=2", "-p", "tp", "--world", "4", "-s", "train.global_batch=4")
    found = forge("data", "show", "tiny.toml", "-p", "./own.py:Own", *axes, "--without", "text", "--json").json
    assert [one["text"] for one in found if one["plugin"] == "own"] == ["rows of 16", "rank 0 of 2, 2 of 4"]


def test_a_plugin_that_tells_nothing_is_named(forge: Forge, folder: Path) -> None:
    (folder / "own.py").write_text(OWN.partition("    @hookimpl\n    def data_stages")[0], encoding="utf-8")
    shown = forge("data", "show", "tiny.toml", "-p", "./own.py:Own", "--without", "text").out
    assert "does not describe its data" in shown


def test_show_of_pairs(forge: Forge, folder: Path) -> None:
    (folder / "pairs.jsonl").write_text('{"anchor": "a", "positive": "b"}\n')
    options = (
        "-p",
        "text_pairs,pair_task:Contrast",
        "-s",
        "text_pairs.path=pairs.jsonl",
        "-s",
        f"text_pairs.cache={folder}/c",
    )
    found = stages(forge, *options, "-s", "text_pairs.kind=embedding")
    assert found["render"] == ["texts as they are"]
    assert found["pack"] == ["one text in a row; a pair is two rows, anchor, positive"]
    assert "1 file (1 .jsonl)" in found["source"][0]


@pytest.mark.slow
def test_prepare_takes_other_names_of_fields_and_roles(forge: Forge, folder: Path) -> None:
    chat = [{"who": "user", "text": "hi"}, {"who": "bot", "text": "ho"}, {"who": "user", "text": "so"}]
    record = {"chat": [*chat, {"who": "bot", "text": "lo"}]}
    (folder / "named.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
    names = ("--rename", "messages=chat", "--rename", "role=who", "--rename", "content=text")
    base = ("data", "prepare", "named.jsonl", "--held-out", "0", "--chat", "--template", "plain")
    forge(*base, "--out", "whole", *names, "--roles", "bot=assistant")
    forge(*base, "--out", "turns", *names, "--roles", "bot=assistant", "--each-turn")
    documents = [json.loads((folder / out / "manifest.json").read_text()) for out in ("whole", "turns")]
    assert [sum(one["documents"] for one in each["shards"]["train"]) for each in documents] == [1, 2]
    seen = forge("data", "inspect", "named.jsonl", *base[5:], *names, "--roles", "bot=assistant", "--json").json
    assert seen["documents"] == 1
    said = forge(*base, "--out", "x", *names, "--roles", "bot=assistant", "--roles", "boot=user", fails=2).err
    assert "--roles: boot = 'user' is of no use: no message has the role 'boot'" in said
    assert "expected two names with = between them" in forge(*base, "--out", "x", "--rename", "chat", fails=2).err
    assert "--roles: has no effect without --chat" in forge(*base[:5], "--out", "x", "--roles", "a=b", fails=2).err


TURNS = [("Say 3.", "Three."), ("Say ü.", "ü!"), ("Say 4.", "Four, it is.")]


def test_rows_are_shown_as_the_model_is_given_them(forge: Forge, folder: Path) -> None:
    """The answer is learned up to its end, and neither the question nor the padding."""
    records = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in TURNS]
    text = "\n".join(json.dumps({"messages": one}) for one in records)
    (folder / "chats.jsonl").write_text(text + "\n", encoding="utf-8")
    asked = ("-p", "sft", "-s", "sft.path=chats.jsonl", "-s", "sft.template=plain", "-s", "sft.held_out=0")
    asked += ("-s", "train.sequence=64", "-s", "sft.packing=pad", "-s", "sft.shuffle=false", "--without", "text")
    found = forge("data", "show", "tiny.toml", *asked, "--sample", "--json").json
    assert {one["plugin"] for one in found["stages"]} >= {"sft"}
    for row, (question, answer) in zip(found["rows"], TURNS, strict=True):
        learned = "".join(token["text"] for token in row["tokens"] if token["learned"])
        rest = "".join(token["text"] for token in row["tokens"] if not token["learned"])
        assert learned == f" {answer}\n\n<end>"
        assert rest.startswith(f"User: {question}\n\nAssistant:")
        assert row["labels"] == 64
        assert row["learned"] == len(learned.removesuffix("<end>").encode()) + 1
        assert len(row["tokens"]) + row["padding"] == 64
    shown = forge("data", "show", "tiny.toml", *asked, "--sample").out
    assert f"row 0 · {len(' Three.') + 3} of 64 labels are learned (15.6%)" in shown
    assert "⟧ │T│h│r│e│e│.│↵" in shown
    assert "more of the last token" in shown


def test_items_of_rows_are_shown_with_their_files(forge: Forge, folder: Path) -> None:
    """The row with items costs more than the text, and is shown first as it is read first."""
    names = items_data.write_scans(folder, (2, 3))
    items_data.write_records(folder / "data.jsonl", [{"text": "only"}, {"text": "a<scan>b<scan>", "scans": names}])
    asked = ("-p", "multimodal", "-p", "items_data:Scans", "-s", "multimodal.path=data.jsonl", "--without", "text")
    asked += ("-s", "train.sequence=16", "-s", "multimodal.held_out=0", "-s", "multimodal.packing=pad")
    asked += ("-s", "multimodal.shuffle=false", "-s", "train.micro_batch=1", "-s", "train.global_batch=2")
    (row, *_) = forge("data", "show", "tiny.toml", *asked, "--sample", "--json").json["rows"]
    texts = [token["text"] for token in row["tokens"]]
    assert texts[:5] == ["a", "[scan 1×1×2]", "b", "[scan 1×1×3]", "<end>"]
    assert [token["learned"] for token in row["tokens"][:5]] == [False, False, True, False, True]
    assert [(one["position"], one["positions"], one["grid"]) for one in row["items"]] == [
        (1, 2, [1, 1, 2]),
        (4, 3, [1, 1, 3]),
    ]
    shown = forge("data", "show", "tiny.toml", *asked, "--sample").out
    assert f"scan 1×1×3 at 4: {folder / '1.npy'} ({folder / 'data.jsonl'}, line 2)" in shown


def test_rows_of_text_are_learned_to_the_last_label(forge: Forge, folder: Path) -> None:
    (row, *_) = forge("data", "show", "tiny.toml", "--sample", "--json").json["rows"]
    assert (row["learned"], row["labels"], row["padding"], len(row["tokens"])) == (16, 16, 0, 17)
    assert "".join(token["text"] for token in row["tokens"]) in (folder / "corpus.txt").read_text(encoding="utf-8")


def test_rows_without_tokens_as_labels_are_refused(forge: Forge, folder: Path) -> None:
    (folder / "own.jsonl").write_text('{"text": "a b", "label": "x"}\n{"text": "c d", "label": "y"}\n' * 8)
    asked = ("-p", "classify,text_labels", "-s", 'classify.classes=["x","y"]', "-s", "text_labels.path=own.jsonl")
    said = forge("data", "show", "tiny.toml", *asked, "--without", "text", "--sample", fails=2).err
    assert "--sample shows rows of tokens whose labels are the next ones; these have others." in said
