"""The page “Freeze and thaw”, each command typed as it stands there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import chat_model
from forge_cli import forge

pytest.importorskip("transformers")
pytestmark = pytest.mark.e2e
PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "freeze.md").read_text(encoding="utf-8")
SMALL = "run.device=cpu;train.steps=4;train.global_batch=4;train.sequence=64;train.evaluate_every=0;text.held_out=0"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    chat_model.write_model(tmp_path / "hf")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("say one and then say two\n" * 400, encoding="utf-8")
    (config,) = blocks("toml")
    for long, short in (("steps = 100", "steps = 1"), ("tokens = 2e6", "tokens = 768")):
        assert long in config
        config = config.replace(long, short)
    (tmp_path / "gradual.toml").write_text(config, encoding="utf-8")
    said = []
    for line in (line for block in blocks("console") for line in block.splitlines()):
        ended = forge(*shlex.split(line.removeprefix("$ "))[1:], environment={"FORGE_SET": SMALL})
        assert ended.code == 0, ended.err
        said.append(ended.out + ended.err)
    (told,) = blocks("text")
    thawed = re.findall(r"freeze: .* thawed .*", said[1])
    words = [re.sub(r"[\d,]+", "N", re.sub(r"'.*?'", "P", line.strip())) for line in (*thawed, told)]
    assert len(thawed) == 2, said[1]
    assert len({*words}) == 1, words
    assert ["after step 1 (" in thawed[0], "after step 3 (" in thawed[1]] == [True, True]
