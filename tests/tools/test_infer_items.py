"""`forge infer` of records with items: what the model gives for each record alone, in the order of the records."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import items_data
import tiny_models
from forge_cli import forge, one_message
from forge_train_kit.data.items import ItemPrompts, padded
from forge_train_tools import open_model

RECORDS: tuple[dict[str, Any], ...] = (
    {"id": "a", "text": "<scan>is", "scans": ["scans/0.npy"]},
    {"text": "no scan at all"},
    {"text": "a <scan> b <scan><scan> c", "scans": ["scans/1.npy", "scans/2.npy", "scans/0.npy"]},
    {"prompt": "what <scan>? ", "completion": " that", "scan": "scans/2.npy"},
    {"prompt": "nowhere", "completion": "x", "scans": ["scans/2.npy"]},
)


def said(*parts: Any, **more: Any) -> dict[str, Any]:
    content = parts[0] if isinstance(parts[0], str) else [*parts]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "that"}], **more}


@pytest.fixture(scope="module", params=["prefix", "cross_attention"])
def desk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, scans and records about them."""
    folder = tmp_path_factory.mktemp("infer")
    items_data.write_scans(folder / "scans", (2, 5, 3))
    items_data.write_records(folder / "in.jsonl", RECORDS)
    settings = ("cross_attention.every=1", "cross_attention.gate=1.0") if request.param == "cross_attention" else ()
    plugins = ("items_data:Scans", request.param)
    tiny_models.trained(folder, *settings, plugins=plugins).rename(folder / "run")
    return folder


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths of items do not depend on where the command was typed."""
    monkeypatch.chdir(tmp_path)


def infer(desk: Path, out: Path, *more: object, data: str = "in.jsonl") -> list[dict[str, Any]]:
    ended = forge("infer", desk / "run", "--data", desk / data, "--out", out, "--batch", "2", *more)
    assert ended.code == 0, ended.err
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def alone(desk: Path) -> Iterator[list[tuple[int, float]]]:
    """The tokens of each record's text, and their log-probabilities in one forward pass."""
    opened = open_model(desk / "run")
    job, model = opened._opened.job, opened.module
    prompts = ItemPrompts(job)
    end = prompts.tokenizer.vocabulary
    for record in RECORDS:
        prompt = record.get("prompt", "")
        rest = record.get("text") or prompt[len(prompt.rstrip()) :] + record["completion"]
        files = record.get("scans") or [record[name] for name in ("scan",) if name in record]
        lead = "<scan>" if files and "<scan>" not in prompt + rest else ""
        ids, asked = [], []
        for text, wanted in ((lead + prompt.rstrip(), False), (rest, True)):
            marked = prompts.tokenizer.encode(text)
            ids += marked
            asked += [wanted and one < end for one in marked]
        sizes = [1] * len(ids)
        if job.hooks.gives("fusion") == "features":
            left = iter(len(items_data.np.load(desk / file)) for file in files)
            sizes = [next(left) if one >= end else 1 for one in ids]
        whole, items = prompts.place(ids, {"scan": files}, "a record", str(desk))
        extras = {name: torch.from_numpy(one) for name, one in padded([items.read(len(whole))]).items()}
        with torch.no_grad():
            each = model.head(model(torch.tensor([whole]), **extras))[0].double().log_softmax(-1)
        places = [sum(sizes[:at]) for at, wanted in enumerate(asked) if wanted]
        yield [(whole[at], float(each[at - 1, whole[at]])) for at in places if at]


def test_log_likelihoods_are_those_of_one_forward_of_each_record(desk: Path, tmp_path: Path) -> None:
    found = infer(desk, tmp_path / "out.jsonl", "--outputs", "log_likelihood,per_token,hidden")
    assert [line["record"] for line in found] == [*range(len(RECORDS))]
    assert found[0]["id"] == "a"
    for line, each in zip(found, alone(desk), strict=True):
        assert line["token_ids"] == [token for token, _ in each]
        assert line["token_log_probabilities"] == pytest.approx([value for _, value in each], abs=1e-5)
        assert line["log_likelihood"] == pytest.approx(sum(value for _, value in each), abs=1e-4)
        assert len(line["token_offsets"]) == len(each)


def test_a_record_with_another_item_has_other_outputs(desk: Path, tmp_path: Path) -> None:
    records = [{"text": "<scan>is", "scans": [f"scans/{one}.npy"]} for one in (0, 1, 0)]
    items_data.write_records(desk / "three.jsonl", records)
    first, other, again = (
        line["hidden"] for line in infer(desk, tmp_path / "o.jsonl", "--outputs", "hidden", data="three.jsonl")
    )
    assert first == pytest.approx(again, abs=1e-6)
    assert first != pytest.approx(other, abs=1e-3)


CHATS = (
    said(
        {"type": "scan_url", "scan_url": {"url": "scans/0.npy"}},
        {"type": "text", "text": "a "},
        {"type": "scan", "path": "scans/2.npy"},
    ),
    said("<scan>a <scan>", scans=["scans/0.npy", "scans/2.npy"]),
    {
        "conversations": [{"from": "human", "value": "<scan>a <scan>"}, {"from": "gpt", "value": "that"}],
        "scan": ["scans/0.npy", {"path": "scans/2.npy"}],
    },
    said("<scan>a <scan>", scans=["scans/1.npy", "scans/2.npy"]),
    said("no scan"),
)


def test_chats_show_their_items_whatever_their_shape(desk: Path, tmp_path: Path) -> None:
    """OpenAI's and LLaVA's are the same; the probability of an answer is that after the whole prompt."""
    items_data.write_records(desk / "chats.jsonl", CHATS)
    asked = ("--outputs", "log_likelihood,per_token,hidden", "--template", "plain")
    first, *same, other, none = infer(desk, tmp_path / "out.jsonl", *asked, data="chats.jsonl")
    for one in same:
        assert one["hidden"] == pytest.approx(first["hidden"], abs=1e-6)
        assert (one["token_ids"], one["token_offsets"]) == (first["token_ids"], first["token_offsets"])
        assert one["token_log_probabilities"] == pytest.approx(first["token_log_probabilities"], abs=1e-5)
    assert other["log_likelihood"] != pytest.approx(first["log_likelihood"], abs=1e-4)
    assert none["token_ids"] == first["token_ids"]
    opened = open_model(desk / "run")
    prompts = ItemPrompts(opened._opened.job)
    text = opened.chats("plain").render([{"role": "user", "content": "<scan>a <scan>"}])
    marked = prompts.tokenizer.encode(text)
    ids, items = prompts.place([*marked, *first["token_ids"]], {"scan": ["scans/0.npy", "scans/2.npy"]}, "x", str(desk))
    extras = {name: torch.from_numpy(one) for name, one in padded([items.read(len(ids))]).items()}
    with torch.no_grad():
        each = opened.module.head(opened.module(torch.tensor([ids]), **extras))[0].double().log_softmax(-1)
    count = len(first["token_ids"])
    expected = [float(each[at - 1, ids[at]]) for at in range(len(ids) - count, len(ids))]
    assert first["token_log_probabilities"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("record", "options", "message"),
    [
        ({"text": "<scan>x", "scans": ["scans/gone.npy"]}, (), "gone.npy: No such file"),
        ({"text": "<scan><scan>", "scans": ["scans/0.npy"]}, (), "the text has 2 placeholders <scan> for 1 scan"),
        ({"text": "<scan>x"}, (), "the text has 1 placeholder <scan> for 0 scans"),
        ({"text": "<scan>", "scans": ["scans/0.npy"]}, (), "has no token that could be asked for"),
        ({"text": f"<scan>{'x' * 80}", "scans": ["scans/0.npy"]}, ("--long", "left"), "Records with items are not cut"),
        (said("<scan>?"), ("--template", "plain"), "the text has 1 placeholder <scan> for 0 scans"),
        (said({"type": "tape", "tape": "a"}), ("--template", "plain"), "content has a part of type 'tape'"),
    ],
)  # fmt: skip
def test_a_record_that_can_not_be_is_one_sentence(
    desk: Path, tmp_path: Path, record: dict[str, Any], options: tuple[str, ...], message: str
) -> None:
    items_data.write_records(desk / "bad.jsonl", [{"text": "fine"}, record])
    out = tmp_path / "out.jsonl"
    said = one_message(forge("infer", desk / "run", "--data", desk / "bad.jsonl", "--out", out, *options), 2)
    assert message in said
    assert "bad.jsonl" in said
    assert not out.exists()
