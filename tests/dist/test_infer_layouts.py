"""`forge infer` on layouts of two ranks, against one process: the same answers, and on some to the last byte."""

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

SETTINGS = forge_cli.DECODER.replace("layers = 1", "layers = 2").replace("sequence = 16", "sequence = 48")
EXPERTS = ("-p", "moe", "-s", "moe.experts=4", "-s", "moe.top_k=2")
RUNS: Mapping[str, tuple[str, ...]] = {
    "tokens": ("-p", "text", "-s", "text.path=texts.jsonl"),
    "experts": ("-p", "text", "-s", "text.path=texts.jsonl", *EXPERTS),
    "class": (
        *("-p", "classify,text_labels", "-s", 'classify.classes=["json","xml"]'),
        *("-s", "text_labels.path=labels.jsonl"),
    ),
    "embedding": (
        *("-p", "embed,text_pairs", "-s", "text_pairs.kind=embedding", "-s", "text_pairs.path=embed.jsonl"),
        *("-s", "train.micro_batch=4", "-s", "embed.pooling=last"),
    ),
}  # fmt: skip
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "fsdp2": ("-p", "fsdp2"),
    "tp2": ("-p", "tp", "-s", "parallel.tp=2"),
    "pp2": ("-p", "pp", "-s", "parallel.pp=2"),
    "cp2": ("-p", "cp", "-s", "parallel.cp=2"),
    "ep2": ("-p", "ep,fsdp2", "-s", "parallel.ep=2"),
}
EXACT = ("fsdp2", "pp2")
"""Layouts on which every row is computed as one process computes it."""
CASES = (
    *(("tokens", layout) for layout in ("fsdp2", "tp2", "pp2", "cp2")),
    *(("experts", "ep2"), ("class", "tp2"), ("class", "cp2"), ("class", "pp2"), ("embedding", "fsdp2")),
    *(("embedding", "tp2"), ("embedding", "cp2")),
)
IN_CI = (("tokens", "tp2"), ("experts", "ep2"), ("class", "pp2"), ("embedding", "fsdp2"), ("embedding", "cp2"))
"""Every kind of run and every layout; tests below have tokens on the other layouts."""


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of each kind, texts of many lengths, and the answers of one process."""
    folder = tmp_path_factory.mktemp("infer")
    passages = [(name, text[:40]) for name in ("json", "xml") for text in heads_data.passages(name, 20)]
    heads_data.write_tasks(folder, passages)
    (folder / "classify.jsonl").rename(folder / "labels.jsonl")
    texts = [text[: 3 + 7 * at % 37] for at, (_, text) in enumerate(passages)]
    heads_data.write(folder / "texts.jsonl", ({"text": text} for text in texts))
    (folder / "mine.toml").write_text(SETTINGS, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, settings in RUNS.items():
            ended = forge("train", "mine.toml", "--name", name, "--quiet", *settings)
            assert ended.code == 0, ended.err
            infer(folder, name, f"{name}.jsonl")
    return folder


def infer(folder: Path, run: str, out: str, *layout: str) -> list[dict[str, Any]]:
    asked = f"hidden,layers.*.hidden,layers.1.hidden_mean,{USUAL.get(run, 'log_likelihood,per_token')}"
    more = () if run == "embedding" else ("--outputs", asked)
    ended = forge("infer", f"runs/{run}", "--data", "texts.jsonl", "--out", out, "--batch", "6", *more, *layout)
    assert ended.code == 0, ended.err
    return [json.loads(line) for line in (folder / out).read_text(encoding="utf-8").splitlines()]


USUAL = {"class": "class"}


@pytest.mark.parametrize(("run", "layout"), few(CASES, IN_CI))
def test_gives_the_answers_of_one_process(desk: Path, monkeypatch: pytest.MonkeyPatch, run: str, layout: str) -> None:
    monkeypatch.chdir(desk)
    whole = [json.loads(line) for line in Path(f"{run}.jsonl").read_text().splitlines()]
    found = infer(desk, run, f"{run}-{layout}.jsonl", "--nproc", "2", *LAYOUTS[layout])
    if layout in EXACT:
        assert Path(f"{run}-{layout}.jsonl").read_bytes() == Path(f"{run}.jsonl").read_bytes()
    assert len(found) == len(whole) == 40
    for mine, theirs in zip(found, whole, strict=True):
        assert mine == {name: near(value) for name, value in theirs.items()}


def test_the_first_bad_record_is_named_whoever_reads_it(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank checks a share: line 8 is the second one's, line 14 the first one's."""
    monkeypatch.chdir(desk)
    heads_data.write(desk / "bad.jsonl", ({"text": "" if at in (7, 13) else "good"} for at in range(20)))
    asked = ("--data", "bad.jsonl", "--out", "bad-out.jsonl", "--batch", "6", "--nproc", "2")
    assert "bad.jsonl, line 8: has no token" in one_message(forge("infer", "runs/tokens", *asked), 2)
    assert not list(desk.glob("bad-out*"))


def test_windows_of_a_record_meet(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever computes them: with one record of many windows, and micro-batches that begin inside of it."""
    monkeypatch.chdir(desk)
    heads_data.write(desk / "long.jsonl", ({"text": text * 12} for text in ("ab", "long text, ", "c", "def f(x): ")))
    for name in ("one", "fsdp2", "cp2"):
        layout = ("--nproc", "2", *LAYOUTS[name]) if name in LAYOUTS else ()
        asked = ("--outputs", "log_likelihood,per_token", "--long", "windows", "--batch", "2")
        ended = forge("infer", "runs/tokens", "--data", "long.jsonl", "--out", f"w-{name}.jsonl", *asked, *layout)
        assert ended.code == 0, ended.err
    assert Path("w-fsdp2.jsonl").read_bytes() == Path("w-one.jsonl").read_bytes()
    whole, sliced = (
        [json.loads(line) for line in Path(f"w-{n}.jsonl").read_text().splitlines()] for n in ("one", "cp2")
    )
    assert [line["tokens"] for line in whole] == [23, 131, 11, 119]
    for mine, theirs in zip(sliced, whole, strict=True):
        assert mine == {name: near(value) for name, value in theirs.items()}


@pytest.mark.parametrize(
    ("suffix", "layout"), few([("parquet", "pp2"), ("safetensors", "fsdp2")], [("parquet", "pp2")])
)
def test_other_kinds_of_files_are_the_same_to_the_last_byte(
    desk: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, layout: str
) -> None:
    monkeypatch.chdir(desk)
    asked = ("--outputs", "layers.*.hidden,log_likelihood", "--batch", "6")
    for name, more in (("one", ()), (layout, ("--nproc", "2", *LAYOUTS[layout]))):
        ended = forge("infer", "runs/tokens", "--data", "texts.jsonl", "--out", f"{name}.{suffix}", *asked, *more)
        assert ended.code == 0, ended.err
    assert Path(f"{layout}.{suffix}").read_bytes() == Path(f"one.{suffix}").read_bytes()


def near(value: Any) -> Any:
    if isinstance(value, list) and not any(isinstance(one, float) for one in value):
        return value
    if isinstance(value, (list, dict)):
        return pytest.approx(value, rel=1e-5, abs=1e-6)
    return pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
