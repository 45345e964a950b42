"""`forge generate` on layouts of two ranks: the answers of one process, greedy and drawn."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import forge_cli
import heads_data
from crossed import few
from forge_cli import forge, one_message

pytestmark = [pytest.mark.dist, pytest.mark.e2e]

SETTINGS = forge_cli.DECODER.replace("layers = 1", "layers = 2") + '[text]\npath = "texts.jsonl"\n'
RUNS: Mapping[str, tuple[str, ...]] = {
    "dense": (),
    "experts": ("-p", "moe", "-s", "moe.experts=4", "-s", "moe.top_k=2"),
}
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "fsdp2": ("-p", "fsdp2"),
    "tp2": ("-p", "tp", "-s", "parallel.tp=2"),
    "cp2": ("-p", "cp", "-s", "parallel.cp=2"),
    "pp2": ("-p", "pp", "-s", "parallel.pp=2"),
    "ep2": ("-p", "ep,fsdp2", "-s", "parallel.ep=2"),
}
CASES = (("dense", "fsdp2"), ("dense", "tp2"), ("dense", "cp2"), ("dense", "pp2"), ("experts", "ep2"))
"""CI has fsdp2 beneath ep2; test_rows_on_layouts.py has pipelines."""
PROMPTS = ["def ", "", "class A", "return x", "x" * 40, "import json\n"]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of each kind, prompts, and the answers of one process."""
    folder = tmp_path_factory.mktemp("generate")
    heads_data.write(folder / "texts.jsonl", ({"text": text} for text in heads_data.passages("json", 20)))
    cold = {"sampling": {"temperature": 0}}
    heads_data.write(
        folder / "prompts.jsonl", ({"prompt": one, **(cold if at % 2 else {})} for at, one in enumerate(PROMPTS))
    )
    (folder / "mine.toml").write_text(SETTINGS, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, settings in RUNS.items():
            ended = forge("train", "mine.toml", "--name", name, "--quiet", *settings)
            assert ended.code == 0, ended.err
            generated(folder, name, f"{name}.jsonl")
    return folder


def generated(folder: Path, run: str, out: str, *layout: str) -> list[dict[str, Any]]:
    asked = ("--from-file", "prompts.jsonl", "--out", out, "--tokens", "10", "--logprobs", "--samples", "2")
    ended = forge("generate", f"runs/{run}", *asked, *layout)
    assert ended.code == 0, ended.err
    return [json.loads(line) for line in (folder / out).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(("run", "layout"), few(CASES, [("dense", "tp2"), ("experts", "ep2")]))
def test_gives_the_answers_of_one_process(desk: Path, monkeypatch: pytest.MonkeyPatch, run: str, layout: str) -> None:
    monkeypatch.chdir(desk)
    whole = [json.loads(line) for line in Path(f"{run}.jsonl").read_text().splitlines()]
    found = generated(desk, run, f"{run}-{layout}.jsonl", "--nproc", "2", *LAYOUTS[layout])
    assert len(found) == len(whole) == 12
    for mine, theirs in zip(found, whole, strict=True):
        near = {name: pytest.approx(theirs[name], abs=1e-5) for name in theirs if name.endswith("probabilities")}
        assert mine == {**theirs, **near}


def test_a_mistake_is_told_once(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)
    asked = ("generate", "runs/dense", "--nproc", "2", "--prompt", "a", "--prompt")
    assert "Prompt 2: has 64 tokens" in one_message(forge(*asked, "b" * 64), 2)
    found = forge(*asked, "b", "--adapter", "somewhere")
    assert "--adapter somewhere: expected a folder of PEFT with an adapter_config.json" in one_message(found, 2)


def test_a_prompt_on_two_processes_is_answered_on_the_screen(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)
    asked = ("generate", "runs/dense", "--prompt", "def ", "--tokens", "6")
    assert forge(*asked, "--nproc", "2", "-p", "tp", "-s", "parallel.tp=2").out == forge(*asked).out
