"""The page “Teach a language model to see, on a laptop”, each command typed as it stands there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge_cli import forge
from pages import blocks, typed

pytestmark = [pytest.mark.e2e, pytest.mark.dist, pytest.mark.slow]
PAGE = "see.md"


@pytest.mark.parametrize("learns", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], learns: bool
) -> None:
    """In CI for few steps: that one of the ways to fuse learns is test_fusions_learn.py's there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make, count, use = blocks(PAGE, "python")
    exec(make, {})  # what a reader would type
    config, _ = blocks(PAGE, "toml")
    Path("see.toml").write_text(config, encoding="utf-8")
    train, show, answer, frozen, verify = typed(PAGE)
    few = "" if learns else ";train.steps=4"
    for words in (train, show, answer):
        ended = forge(*words, environment={"FORGE_SET": f"run.device=cpu{few if words is train else ''}"})
        assert ended.code == 0, ended.err
    capsys.readouterr()
    exec(count, {})
    right, other = (int(line.split()[0]) for line in capsys.readouterr().out.splitlines())
    assert right >= (95 if learns else 0)
    assert other <= 15
    exec(use, {})
    asked = [json.loads(line)["caption"] for line in Path("asked.jsonl").read_text(encoding="utf-8").splitlines()]
    shown = forge(*show, environment={"FORGE_SET": "run.device=cpu"}).out.strip()
    assert capsys.readouterr().out.strip().endswith(shown)
    assert not learns or shown in asked
    ended = forge(*frozen, "-s", "train.steps=2", environment={"FORGE_SET": "run.device=cpu;train.evaluate_every=0"})
    assert ended.code == 0, ended.out + ended.err
    assert [*tmp_path.glob("cache/forge-train/encoded/*/*/*.safetensors")]
    short = ("-s", "train.global_batch=2", "-s", "train.micro_batch=2", "-s", "decoder.layers=1")
    ended = forge(*verify, *short, environment={"FORGE_SET": "run.device=cpu"})
    assert ended.code == 0, ended.out + ended.err
