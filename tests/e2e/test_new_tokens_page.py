"""The page “Add tokens to a model”, each command typed as it stands there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import chat_model
from forge_cli import forge

pytest.importorskip("transformers")
pytestmark = pytest.mark.e2e
PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "new-tokens.md").read_text(encoding="utf-8")
SMALL = "run.device=cpu;train.steps=2;train.global_batch=4;train.sequence=32;train.evaluate_every=0;text.held_out=0"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    chat_model.write_model(tmp_path / "hf")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("<tool>say one</tool> and then two\n" * 200, encoding="utf-8")
    said = ""
    for line in (line for block in blocks("console") for line in block.splitlines()):
        words = shlex.split(line.removeprefix("$ "))[1:]
        ended = forge(*words, environment={"FORGE_SET": SMALL} if words[0] == "train" else {})
        assert ended.code == 0, ended.err
        said += ended.out + ended.err
    (told,) = blocks("text")
    assert told.strip() in said
    assert len(AutoTokenizer.from_pretrained("tools-hf")) == 310
    assert AutoModelForCausalLM.from_pretrained("tools-hf").config.vocab_size == 310
