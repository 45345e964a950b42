"""A token that ends turns and that the base never learned, in a run that does not train the head: told at the start."""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path

import pytest
import torch

import chat_model
from forge_cli import forge

pytest.importorskip("transformers")
pytestmark = pytest.mark.e2e
END, START = 2, 1
COUNT = itertools.count()
SMALL = {
    "FORGE_SET": "run.device=cpu;train.steps=2;train.global_batch=4;train.sequence=32;train.evaluate_every=0;"
    "sft.held_out=0;sft.path=chats.jsonl;adamw.lr=1e-3"
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of a model whose head's row of that token is its own, zero, or as another's; in one, weights are tied."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("stop")
    for name in ("own", "zero", "same", "tied"):
        chat_model.write_model(folder / name)
        model = AutoModelForCausalLM.from_pretrained(folder / name)
        if name == "tied":
            model.config.tie_word_embeddings = True
            model.tie_weights()
        rows = model.get_output_embeddings().weight.data
        if name != "own":
            rows[END] = rows[START] if name == "same" else torch.zeros_like(rows[END])
        model.save_pretrained(folder / name)
    chat_model.write_chats(folder / "chats.jsonl")
    return folder


@pytest.fixture(autouse=True)
def _there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))


def warnings(*words: str, name: str = "") -> list[str]:
    """Those in the logs of all processes of a run."""
    named = () if "--resume" in words else ("--name", name := name or f"run-{next(COUNT)}")
    ended = forge("train", *words, *named, environment=SMALL)
    assert ended.code == 0, ended.err
    logs = [file.read_text(encoding="utf-8") for file in Path("runs", name, "log").glob("rank-*.log")]
    return [line for log in logs for line in log.splitlines() if "sft: a turn ends with token" in line]


slow = partial(pytest.param, marks=pytest.mark.slow)
HEAD = ("-s", 'lora.tune=["head"]')
ROWS = ("-p", "new_rows", "-s", f"new_rows.ids=[{END}]")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "words", "says"),
    [
        ("zero", ("-p", "lora"), "whose row of head.weight is zero"),
        ("same", ("-p", "lora"), f"whose row of head.weight is the same as that of token {START}"),
        ("tied", ("-p", "lora"), "whose row of embedding.weight is zero"),
        ("same", ("-p", "freeze", "-s", 'freeze.parameters=["head.*"]'), "is the same as that of token"),
        ("zero", ("-p", "lora,fsdp2", "--nproc", "2"), "is zero"),
        slow("same", ("-p", "lora,tp", "--nproc", "2", "-s", "parallel.tp=2"), f"that of token {START}"),
        slow("zero", ("-p", "lora,pp", "--nproc", "2", "-s", "parallel.pp=2", "-s", "train.micro_batch=1"), "is zero"),
    ],
)
def test_is_told_once(folder: str, words: tuple[str, ...], says: str) -> None:
    (told,) = warnings(folder, "-p", "sft", *words)
    assert says in told
    assert f"-s 'new_rows.ids=[{END}]'" in told


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("own", ("-p", "lora")),
        ("zero", ()),
        ("zero", ("-p", "lora", *HEAD)),
        ("zero", ("-p", "lora", "-s", 'lora.modules=["*"]')),
        ("zero", ("-p", "lora", *ROWS, "-s", 'checkpoint.only=["*lora_*", "embedding.*", "head.*"]')),
        ("same", ROWS),
    ],
    ids=json.dumps,
)
def test_is_not_told_without_reason(folder: str, words: tuple[str, ...]) -> None:
    assert warnings(folder, "-p", "sft", *words) == []


def test_is_not_told_again_where_a_run_goes_on() -> None:
    assert len(warnings("zero", "-p", "sft,lora", name="goes-on")) == 1
    assert len(warnings("--resume", "runs/goes-on", "-s", "train.steps=3", name="goes-on")) == 1
