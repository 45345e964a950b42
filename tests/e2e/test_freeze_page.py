"""The page “Freeze and thaw”, each command typed as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forge_cli import forge
from pages import at_a_desk, blocks, typed

pytest.importorskip("transformers")
pytestmark = pytest.mark.e2e
PAGE = "freeze.md"
SMALL = "run.device=cpu;train.steps=4;train.global_batch=4;train.sequence=64;train.evaluate_every=0;text.held_out=0"


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_a_desk(tmp_path, monkeypatch)
    (config,) = blocks(PAGE, "toml")
    (tmp_path / "gradual.toml").write_text(config, encoding="utf-8")
    shown = forge("config", "show", "gradual.toml", "--from", "hf")
    assert shown.code == 0, shown.err
    for long, short in (("steps = 20", "steps = 1"), ("tokens = 4e5", "tokens = 768")):
        assert long in config
        config = config.replace(long, short)
    (tmp_path / "gradual.toml").write_text(config, encoding="utf-8")
    said = []
    for words in typed(PAGE):
        ended = forge(*words, environment={"FORGE_SET": SMALL})
        assert ended.code == 0, ended.err
        said.append(ended.out + ended.err)
    (told,) = blocks(PAGE, "text")
    thawed = re.findall(r"freeze: .* thawed .*", said[1])
    messages = [re.sub(r"[\d,]+", "N", re.sub(r"'.*?'", "P", line.strip())) for line in (*thawed, told)]
    assert len(thawed) == 2, said[1]
    assert len({*messages}) == 1, messages
    assert ["after step 1 (" in thawed[0], "after step 3 (" in thawed[1]] == [True, True]
