"""The page “Add tokens to a model”, each command typed as it stands there."""

from __future__ import annotations

from pathlib import Path

import pytest

import chat_model
from forge_cli import forge
from pages import blocks, typed

pytest.importorskip("transformers")
pytestmark = pytest.mark.e2e
PAGE = "new-tokens.md"
SMALL = "run.device=cpu;train.steps=2;train.global_batch=4;train.sequence=32;train.evaluate_every=0;text.held_out=0"


@pytest.mark.slow
def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    chat_model.write_model(tmp_path / "hf")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("<tool>say one</tool> and then two\n" * 200, encoding="utf-8")
    said = ""
    for words in typed(PAGE):
        ended = forge(*words, environment={"FORGE_SET": SMALL} if words[0] == "train" else {})
        assert ended.code == 0, ended.err
        said += ended.out + ended.err
    (told,) = blocks(PAGE, "text")
    assert told.strip() in said
    assert len(AutoTokenizer.from_pretrained("tools-hf")) == 310
    assert AutoModelForCausalLM.from_pretrained("tools-hf").config.vocab_size == 310
