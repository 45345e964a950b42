"""The page “Repeat a run elsewhere”, each command typed as it stands there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge_cli import forge
from pages import blocks, typed

pytestmark = [pytest.mark.e2e]
PAGE = "repeat.md"


@pytest.mark.slow
def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shorter = "run.device=cpu;train.sequence=64;decoder.layers=1;decoder.dim=32"
    ended = [forge(*words, environment={"FORGE_SET": shorter}) for words in typed(PAGE)]
    assert [one.code for one in ended] == [0, 0, 0, 0, 0, 1], ended
    equal, table = blocks(PAGE, "text")
    assert equal in ended[2].out
    assert table in ended[5].out
    assert "first difference is at step 1: lr is " in ended[5].err
    index = json.loads((tmp_path / "weights" / "pack.json").read_text())
    assert index["checkpoint"] == "run/checkpoints/step-00000004"
    assert (tmp_path / "weights" / "run" / "checkpoints" / "step-00000004" / "manifest.json").is_file()
