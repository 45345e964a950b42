"""Every command on the page about heads, typed as it stands there; and its lines of Python."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import heads_data
from forge_cli import forge

pytest.importorskip("transformers")
pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "heads.md"
FEW = ["-s", "train.steps=4", "-s", "train.sequence=256", "-s", "train.global_batch=8"]
"""What the page leaves out, so that its commands are fast here."""


def typed(command: list[str]) -> str:
    ended = forge(*command)
    assert ended.code == 0, f"{shlex.join(command)}\n{ended.out}{ended.err}"
    return str(ended.out)


@pytest.mark.extended
def test_the_page_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    heads_data.packages(tmp_path / "packages.jsonl", ("email", "encodings", "pydoc_data"), 40)
    heads_data.kinds(tmp_path / "kinds.jsonl", 40)
    heads_data.neighbours(tmp_path / "pairs.jsonl", 120)
    heads_data.preferences(tmp_path / "preferences.jsonl", 120)
    heads_data.write(tmp_path / "text.jsonl", ({"text": text} for text in heads_data.passages("email", 40)))
    (tmp_path / "corpus.txt").write_text("\n\n".join(heads_data.passages("email", 40)), encoding="utf-8")
    small = [
        "decoder.tied=true",
        "decoder.dim=32",
        "decoder.layers=1",
        "decoder.heads=2",
        "text.path=text.jsonl",
        "text.held_out=0.2",
    ]
    typed(["train", "--quiet", "--name", "lm", *(word for one in small for word in ("-s", one)), *FEW])
    typed(["checkpoint", "export", "runs/lm", "MODEL"])
    text = PAGE.read_text(encoding="utf-8")
    blocks: list[str] = re.findall(r"```(?:bash|python)\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    commands = 0
    for block in blocks:
        if not block.startswith("forge "):
            exec(block, names)
            continue
        for line in block.splitlines():
            _, *command = shlex.split(line)
            kind = "text" if "--without" in line else "text_labels" if "text_labels" in line else "text_pairs"
            held_out = f"{kind}.held_out=0.2"
            more = [*FEW, "-s", held_out] if command[0] == "train" else []
            told = typed([*command, *more, *(["--quiet"] if more else [])])
            commands += 1
            assert command[0] != "eval" or any(one in told for one in ("accuracy", "recall_at_1"))
    assert commands == 13
    assert names["vector"].norm().item() == pytest.approx(1)
    config = json.loads((tmp_path / "packages-hf" / "config.json").read_text())
    assert list(config["label2id"]) == ["email", "encodings", "pydoc_data"]
    ended = forge("generate", "runs/rewards", "--prompt", "x")
    assert ended.code == 2
    assert "Generating text needs token logits; the head of this model gives 'rewards'." in ended.err
