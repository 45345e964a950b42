"""The page “Score or embed a data set”, each command typed as it stands there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge_cli import forge
from pages import at_a_desk, blocks, typed

pytest.importorskip("transformers")
pytestmark = [pytest.mark.e2e, pytest.mark.dist, pytest.mark.slow]
PAGE = "infer.md"

QUESTIONS = (
    ("say one and then", " say two"),
    ("say one and then", " say one"),
    ("", "say one and then say two"),
)
"""Those of the page."""


def by_transformers(question: tuple[str, str]) -> float:
    """The log-likelihood of a completion, or of a text."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained("hf").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained("hf")
    given, ids = (tokenizer("".join(question[:size])).input_ids for size in (1, 2))
    with torch.no_grad():
        each = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return sum(float(each[at - 1, ids[at]]) for at in range(max(len(given), 1), len(ids)))


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_a_desk(tmp_path, monkeypatch)
    for name, block in zip(("questions", "chats"), blocks(PAGE, "json"), strict=True):
        (tmp_path / f"{name}.jsonl").write_text(block, encoding="utf-8")
    for words in typed(PAGE):
        ended = forge(*words, environment={"FORGE_SET": "run.device=cpu"})
        assert ended.code == 0, ended.err
    exec(blocks(PAGE, "python")[0], {})  # what a reader would type
    scores = [json.loads(line) for line in Path("scores.jsonl").read_text().splitlines()]
    assert [one["id"] for one in scores] == ["q1", "q2", "q3"]
    for name in ("again.jsonl", "shared.jsonl"):
        assert Path(name).read_bytes() == Path("scores.jsonl").read_bytes()
    for mine, theirs in zip(map(json.loads, Path("split.jsonl").read_text().splitlines()), scores, strict=True):
        assert mine == {**theirs, "log_likelihood": pytest.approx(theirs["log_likelihood"], rel=1e-6)}
    assert [one["log_likelihood"] for one in scores] == pytest.approx([*map(by_transformers, QUESTIONS)], rel=1e-5)
    chats = [json.loads(line) for line in Path("chats-scored.jsonl").read_text().splitlines()]
    assert [one["tokens"] for one in chats] == [len(one["token_ids"]) for one in chats]
    (windows,) = map(json.loads, Path("texts.jsonl").read_text().splitlines())
    assert windows["tokens"] > 400
    (state,) = map(json.loads, Path("states.jsonl").read_text().splitlines())
    assert state["cut"] > 0
    assert {"hidden", "log_likelihood", "tokens"} <= state.keys()
