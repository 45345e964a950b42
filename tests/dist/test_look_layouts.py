"""`forge debug look` over ranks: the numbers of a layout are those of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import heads_data
from capture_cases import HEADS, SHAPES
from crossed import few
from forge_cli import forge, one_message
from forge_train_tools.looking import look as looking
from forge_train_tools.looking.look import Looked, Looking, look
from forge_train_tools.testing import Pool, run_forge

pytest.importorskip("transformers")
pytestmark = [pytest.mark.dist]

TEXT = "if a<b: é\n\treturn '&'"
PASSAGES = {name: heads_data.passages(name, 20) for name in ("json", "xml")}
MODELS: Mapping[str, tuple[tuple[str, ...], Mapping[str, Any]]] = {
    **SHAPES,
    "sinks": (
        ("eager",),
        {**HEADS, "decoder.sinks": True, "decoder.window": 5, "decoder.window_layers": [True, False]},
    ),
    "classify": (("classify", "text_labels"), {**HEADS, "classify.classes": ["json", "xml"]}),
}
LAYOUTS: Mapping[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    "fsdp2": (2, (), ()),
    "tp2": (2, ("tp",), ("parallel.tp=2",)),
    "pp2": (2, ("pp",), ("parallel.pp=2",)),
    "cp2": (2, ("cp", "fsdp2"), ("parallel.cp=2",)),
    "ulysses": (2, ("cp", "fsdp2"), ("parallel.cp=2", 'cp.method="ulysses"')),
    "ep2": (2, ("ep", "fsdp2"), ("parallel.dp_shard=2", "parallel.ep=2")),
    "tp2cp2": (4, ("tp", "cp", "fsdp2"), ("parallel.tp=2", "parallel.cp=2")),
}
CELLS = (
    *(("decoder", layout) for layout in ("fsdp2", "tp2", "pp2", "tp2cp2")),
    *(("moe", "ep2"), ("delta_net", "tp2"), ("arcee", "pp2"), ("gpt_neox", "cp2")),
    *(("sinks", "tp2"), ("sinks", "ulysses"), ("classify", "cp2")),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def run(model: str) -> Path:
        plugins, settings = MODELS[model]
        folder = tmp_path_factory.mktemp(model)
        more: dict[str, Any] = {"checkpoint.every": 2, "adamw.lr": 0.01, "train.sequence": 32}
        if model == "classify":
            heads_data.write_tasks(folder, [(name, text[:30]) for name in ("json", "xml") for text in PASSAGES[name]])
            more["text_labels.path"] = str(folder / "classify.jsonl")
        return run_forge(list(plugins), {**settings, **more}, steps=2, folder=folder).run

    return run


@pytest.fixture
def over_ranks(ranks: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are there already do the work of those that a command would start."""

    def launch_once(function: str, arguments: dict[str, Any], nproc: int) -> Any:
        return ranks.run(function, nproc, **arguments)[0]

    monkeypatch.setattr(looking, "launch_once", launch_once)


def alike(found: Looked, right: Looked) -> None:
    ours, theirs = found.tensors(), right.tensors()
    assert ours.keys() == theirs.keys()
    for name, one in theirs.items():
        torch.testing.assert_close(ours[name], one, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    words = {name: value for name, value in right.plain().items() if name not in ("norms", "attention", "lens")}
    assert {name: found.plain()[name] for name in words} == words
    assert (found.lens and found.lens.texts) == (right.lens and right.lens.texts)


IN_CI = (
    *(("decoder", "pp2"), ("decoder", "tp2cp2"), ("moe", "ep2"), ("delta_net", "tp2"), ("arcee", "pp2")),
    *(("sinks", "ulysses"), ("classify", "cp2"), ("decoder", "fsdp2")),
)
"""Every layout, and every model whose modules split in a way of their own."""


@pytest.mark.parametrize(("model", "layout"), few(CELLS, IN_CI))
def test_one_process_on_any_layout(model: str, layout: str, trained: Callable[[str], Path], over_ranks: None) -> None:
    nproc, plugins, settings = LAYOUTS[layout]
    heads = () if model == "delta_net" else ("0.1", "1.*")
    assert (look(Looking(path=trained(model), text=TEXT)).lens is None) == (model == "classify")
    one = look(Looking(path=trained(model), text=TEXT, heads=heads))
    alike(look(Looking(path=trained(model), text=TEXT, heads=heads, plugins=plugins, set=settings), nproc=nproc), one)


def test_a_steered_look(trained: Callable[[str], Path], over_ranks: None) -> None:
    path, settings = trained("decoder"), ('steer.zero_heads=["0.1","1.2"]',)
    one = look(Looking(path=path, text=TEXT, plugins=("steer",), set=settings))
    asked = Looking(path=path, text=TEXT, plugins=("steer", "tp"), set=("parallel.tp=2", *settings))
    alike(look(asked, nproc=2), one)
    plain = look(Looking(path=path, text=TEXT))
    assert not torch.allclose(one.norms[-1], plain.norms[-1])


def test_a_page_of_two_ranks(trained: Callable[[str], Path], tmp_path: Path) -> None:
    asked = ("debug", "look", trained("decoder"), "--text", TEXT, "--json")
    layout = ("--nproc", 2, "-p", "tp", "-s", "parallel.tp=2")
    page = tmp_path / "look.html"
    ended = forge(*asked, *layout, "--out", page)
    assert ended.code == 0, ended.err
    one = forge(*asked)
    assert ended.json["tokens"] == one.json["tokens"]
    assert torch.tensor(ended.json["norms"]).allclose(torch.tensor(one.json["norms"]), rtol=1e-4)
    assert page.read_text(encoding="utf-8").count("data:image/png;base64") == 1 + len(one.json["attention"])


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--nproc", 3, "-p", "tp", "-s", "parallel.tp=2"), "= 2 does not divide the 3 processes"),
        (("-p", "tp", "-s", "parallel.tp=2"), "there is 1 process"),
        (("--nproc", 2, "--heads", "0.4"), "--heads: 0.4: the heads of layer 0 are 0 to 3"),
    ],
)
def test_mistakes(trained: Callable[[str], Path], more: tuple[object, ...], says: str) -> None:
    message = one_message(forge("debug", "look", trained("decoder"), "--text", "x", "--json", *more), 2)
    assert says in message
