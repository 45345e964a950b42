"""The page “Look inside”, each command typed as it stands there."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from forge_cli import forge
from pages import at_a_desk, blocks, typed

pytest.importorskip("transformers")
pytestmark = [pytest.mark.e2e, pytest.mark.slow]
PAGE = "look-inside.md"


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    at_a_desk(tmp_path, monkeypatch)
    *looks, last = typed(PAGE)
    for words in looks:
        ended = forge(*words, environment={"FORGE_SET": "run.device=cpu"})
        assert ended.code == 0, ended.err
    exec("\n".join(blocks(PAGE, "python")), {})  # what a reader would type
    assert "torch.Size([" in capsys.readouterr().out
    assert forge(*last).code == 0
    folder = Path("runs/watched/artifacts/capture")
    assert sorted(file.stem for file in folder.iterdir()) == ["step-00000002", "step-00000004"]
    assert {"input_ids", "lens.rank", "attention.0.0"} <= load_file("look.safetensors").keys()
    assert Path("look.html").read_text() != Path("without.html").read_text()
