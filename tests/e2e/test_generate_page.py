"""The page “Generate and chat”, each command typed as it stands there."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from forge_cli import forge
from pages import at_a_desk, blocks, typed

pytest.importorskip("transformers")
pytestmark = [pytest.mark.e2e, pytest.mark.dist, pytest.mark.slow]
PAGE = "generate.md"
MESSAGES = "".join(re.findall(r"^> (.*\n)", blocks(PAGE, "text")[0], re.MULTILINE))
"""Lines of the chat."""


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    at_a_desk(tmp_path, monkeypatch)
    (tmp_path / "questions.jsonl").write_text(blocks(PAGE, "json")[0], encoding="utf-8")
    shown = []
    for words in typed(PAGE):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(MESSAGES.encode())))
        ended = forge(*words, environment={"FORGE_SET": "run.device=cpu"})
        assert ended.code == 0, ended.err
        shown.append(ended.out)
    answers = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    assert [one["id"] for one in answers] == ["q1", "q2", "q3"]
    assert shown[0] == f"say one and then{answers[0]['text']}\n", "prompt 0 is drawn as it is alone"
    assert answers[2]["tokens"] == 5
    for name in ("shared.jsonl", "split.jsonl"):
        assert Path(name).read_bytes() == Path("answers.jsonl").read_bytes()
    (chat,) = map(json.loads, Path("chat.jsonl").read_text().splitlines())
    assert [one["role"] for one in chat["messages"]] == ["system", *2 * ["user", "assistant"]]
    assert shown[2] == "".join(f"{one['content']}\n" for one in chat["messages"][2::2])
    capsys.readouterr()
    exec(blocks(PAGE, "python")[0], {})  # what a reader would type
    texts = eval(capsys.readouterr().out)
    screen = next(text for text in shown if text.startswith("[prompt 1, sample 1]"))
    assert screen.startswith(f"[prompt 1, sample 1]\nsay one{texts[0]}\n[prompt 1, sample 2]\nsay one{texts[1]}\n")
