"""The page “Choose a layout”: a search, what it writes, and what it refuses."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from forge_cli import forge
from pages import blocks, typed

pytestmark = [pytest.mark.e2e]


@pytest.mark.slow
def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _, *narrow = typed("choose-a-layout.md")
    ended = [forge(*words, environment={"FORGE_SET": "run.device=cpu"}) for words in narrow]
    assert [one.code for one in ended] == [0] * 5, ended
    assert "The front" in ended[0].out
    assert "dp_shard 2" in ended[0].out
    written = tomllib.loads(Path("best.toml").read_text())
    assert (written["parallel"]["dp_shard"], written["train"]["micro_batch"]) == (2, 1)
    assert "zero1" in written["plugins"]

    again = forge(*narrow[0])
    assert (again.code, "best.toml exists" in again.err) == (2, True)


def test_bad_input_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (file,) = (one for one in blocks("choose-a-layout.md", "text") if "[[links]]" in one)
    Path("mine.toml").write_text(file.replace("memory = 24e9", ""))
    for words, said in (
        (["--search"], "--search needs either --device NAME or --cluster FILE"),
        (["--search", "--device", "h10"], "no data sheet of a device 'h10'"),
        (["--search", "--cluster", "none.toml"], "no cluster file none.toml"),
        (["--search", "--cluster", "mine.toml"], "memory is missing"),
        (["--search", "--device", "h100", "--price", "2"], "--price needs --tokens"),
        (["--search", "--device", "h100", "--tokens", "1e12", "--price", "two"], "'two' is not a valid float"),
        (["--search", "--device", "h100", "--tokens", "1e12", "--price", "nan"], "--price must be a finite number"),
        (["--search", "--device", "h100", "--tokens", "inf"], "--tokens must be a finite number"),
        (["--search", "--device", "h100", "--svg", "a.svg"], "--svg is of no use with --search"),
        (["--write", "a.toml"], "--write is of use with --search only"),
    ):
        ended = forge("plan", *words)
        assert ended.code == 2, words
        assert said in ended.err, words
    assert [one.name for one in tmp_path.iterdir()] == ["mine.toml"]
