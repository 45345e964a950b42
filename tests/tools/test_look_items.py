"""`forge debug look` of models that take items, and of those whose prefixes see all of themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import items_data
import tiny_models
from forge_cli import forge, one_message
from forge_train_kit.data.items import ItemPrompts, padded
from forge_train_tools import open_model
from forge_train_tools.looking.look import Looking, look

TEXT = "a<scan>b <scan>"


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scans")
    items_data.write_scans(folder, (2, 3))
    return folder


def trained(folder: Path, fusion: str, *values: str) -> Path:
    values = (*values, *(("cross_attention.every=1", "cross_attention.gate=1.0") if "cross" in fusion else ()))
    return tiny_models.trained(folder, *values, plugins=("items_data:Scans", fusion))


@pytest.fixture(scope="module", params=["prefix", "cross_attention", "mot"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp(request.param), request.param)


def asked(run: Path, scans: Path, text: str = TEXT, **more: Any) -> Looking:
    return Looking(path=run, text=text, items={"scan": [str(scans / "0.npy"), str(scans / "1.npy")]}, **more)


def test_numbers_are_those_of_a_forward_with_the_items(run: Path, scans: Path) -> None:
    found = look(asked(run, scans, heads=("1.*",)))
    opened = open_model(run)
    prompts = ItemPrompts(opened._opened.job)
    ids, items = prompts.place(prompts.tokenizer.encode(TEXT), {"scan": ["0.npy", "1.npy"]}, "a prompt", str(scans))
    assert found.ids == ids
    assert found.text == TEXT
    labels = [text for text in found.texts if text.startswith("<scan>[")]
    several = opened._opened.job.hooks.gives("fusion") == "features"
    assert labels == [f"<scan>[{at}]" for at in range(5 if several else 2)]
    extras = {name: torch.from_numpy(one) for name, one in padded([items.read(len(ids))]).items()}
    with torch.no_grad():
        hidden = opened.module(torch.tensor([ids]), **extras)
        best = opened.module.head(hidden)[0].float().softmax(-1).max(-1)
    assert found.lens is not None, found.no_lens
    assert found.lens.top[-1].equal(best.indices)
    torch.testing.assert_close(found.lens.probability[-1], best.values)
    before_items = [at for at, text in enumerate(found.texts[1:]) if text in labels]
    assert (found.lens.rank == 0).any(0).nonzero().flatten().tolist() == before_items
    assert found.attention["1.0"].sum(-1).allclose(torch.ones(len(ids)))
    other = look(asked(run, scans, "a<scan>b <scan>c"))
    assert not torch.equal(other.norms[:, : len(ids)], look(Looking(path=run, text="a")).norms[:, :1])


def test_a_page_names_positions_of_items(run: Path, scans: Path, tmp_path: Path) -> None:
    items = [word for at in (0, 1) for word in ("--item", f"scan={scans / f'{at}.npy'}")]
    page = tmp_path / "look.html"
    assert not forge("debug", "look", run, "--text", TEXT, *items, "--out", page).code
    assert "&lt;scan&gt;[1]" in page.read_text(encoding="utf-8")
    said = forge("debug", "look", run, "--text", "a", *items[:2], "--out", page, "--nproc", "2")
    assert one_message(said, 2) == "--image, --item: a text with items is looked at on one process; leave out --nproc."
    said = forge("debug", "look", run, "--text", "<scan><scan><scan>", *items, "--out", page)
    assert "--text: the text has 3 placeholders <scan> for 2 scans" in one_message(said, 2)
    said = forge("debug", "look", run, "--text", "a", "--image", "cat.png", "--out", page)
    assert one_message(said, 2) == "This model takes text and 'scan', but no 'image'."


def test_items_before_a_text_are_its_prefix(scans: Path, tmp_path: Path) -> None:
    """The first tokens that are not learned see all of themselves, as in training."""
    run = trained(tmp_path, "prefix", "decoder.prefix=true")
    found = look(asked(run, scans, "<scan><scan>ab", heads=("0.0",)))
    seen = found.attention["0.0"] > 0
    assert seen[:5, :5].all()
    assert not seen[:5, 5:].any()
    assert seen[5, :6].all()
    assert not seen[5, 6:].any()
    text = look(Looking(path=run, text="abc", heads=("0.0",)))
    assert torch.equal(text.attention["0.0"] > 0, torch.ones(3, 3).tril().bool())
