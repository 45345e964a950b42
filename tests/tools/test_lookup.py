"""Guesses from the text itself: the answers are those without, and what was guessed is counted."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from forge_cli import forge
from forge_train import ConfigError
from forge_train_tools import generate
from forge_train_tools.generation.drafts import Drafts
from forge_train_tools.generation.lookup import Text, check
from forge_train_tools.generation.sampling import Sampling
from forge_train_tools.testing import run_forge
from generation_rows import Greedy, generated, worst
from test_drafts_side_by_side import MILD, MODELS, ROWS, poisoned

pytestmark = pytest.mark.unit
__all__ = ["poisoned"]


@pytest.mark.parametrize(
    ("ids", "guesses"),
    [
        ([1, 2, 3, 4], []),
        ([1, 2, 3, 4, 9, 2, 3], [4]),
        ([1, 2, 3, 4, 5, 6, 9, 2, 3, 4], [5, 6]),
        ([1, 2, 3, 4, 5, 6, 9, 2, 3, 4, 5], [6, 9, 2]),
        ([1, 2, 3, 4, 5, 6, 9, 2, 3, 4, 5, 7], []),
        ([1, 2, 1, 2, 1, 2, 1, 2], [1, 2, 1, 2]),
        ([7, 7, 7, 7, 7], [7, 7, 7]),
        ([1, 2, 3, 1, 2, 4, 1, 2], []),
        ([1, 2, 3, 1, 2, 4, 1, 2, 4], [1, 2]),
    ],
)
def test_guesses_what_followed_before(ids: list[int], guesses: list[int]) -> None:
    """One token, and as many more as the place guessed right before; round and round, where the text goes round; of the
    newest place; after a place that was wrong, only once the next one is right."""
    assert Text().guess(ids, 4) == guesses
    text = Text()
    for end in range(1, len(ids)):
        text.guess(ids[:end], 1)
    assert text.guess(ids, 4) == guesses


def some_right(monkeypatch: pytest.MonkeyPatch, answers: Sequence[Greedy], most_right: int) -> None:
    """Guess the next tokens of known answers: from none right to `most_right`, and none in some forwards."""

    def guess(self: Text, ids: Sequence[int], most: int) -> list[int]:
        end = len(ids)
        answer = next(one.ids for one in answers if one.ids[:end] == [*ids])
        right = (7 * end + 3) % (most_right + 1)
        return [
            one if at < right else abs(one - 1) for at, one in enumerate(answer[end : end + (5 * end) % (most + 1)])
        ]

    monkeypatch.setattr(Text, "guess", guess)


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", ["keys and values", "latents", "windows", "experts"])
@pytest.mark.parametrize("most_right", [0, 3])
def test_rows_are_those_without_lookup(monkeypatch: pytest.MonkeyPatch, name: str, rows: str, most_right: int) -> None:
    """With guesses that are always wrong, too: nothing is read of them, and no number changes."""
    plugins, values = MODELS[name]
    job, model = tiny_models.composed(MILD, *values, plugins=plugins)
    check(job, model, 3)
    plain = generated(job, model, ROWS[rows](), 3)
    some_right(monkeypatch, plain, most_right)
    for slots in (1, 3, 8):
        drafts = Drafts(lookup=3)
        assert worst(generated(job, model, ROWS[rows](), slots, drafts), plain) <= (1e-6 if name == "experts" else 0)
        assert drafts.proposed > 30
        assert drafts.accepted > 10 if most_right else drafts.accepted == 0


def test_a_text_that_repeats_itself_takes_fewer_forwards() -> None:
    job, model = tiny_models.composed(MILD)
    passes = [0, 0]

    def counted(at: int) -> Callable[..., None]:
        return lambda *_: passes.__setitem__(at, passes[at] + 1)

    found = []
    for at, drafts in enumerate((None, Drafts(lookup=4))):
        hook = model.parts[0].register_forward_hook(counted(at))
        found.append(generated(job, model, [Greedy(0, [5, 6, 7], 40)], 1, drafts))
        hook.remove()
    assert worst(*found) == 0
    assert drafts is not None
    assert drafts.accepted > 5
    assert passes == [40, 40 - drafts.accepted]


def test_what_can_not_forget_is_refused() -> None:
    delta = ("decoder.layers=4", "delta_net.heads=4", "delta_net.k_heads=2", "delta_net.k_dim=6")
    job, model = tiny_models.composed(*delta, plugins=("delta_net",))
    with pytest.raises(ConfigError, match=r"can't undo wrong guesses: RowMemory can't .* positions\. Leave lookup out"):
        check(job, model, 1)
    with pytest.raises(ConfigError, match="drafts and lookup both guess the next tokens; leave one of them out"):
        Sampling(drafts=1, lookup=1)
    with pytest.raises(ConfigError, match="lookup: expected at least 0"):
        Sampling(lookup=-1)


def test_commands_give_the_same_answers_and_count(tmp_path: Path) -> None:
    """Drawn and greedy, scored, with a stop text, one and several, to a file, and from Python."""
    run = run_forge((), {"adamw.lr": 0.02, "checkpoint.every": 25}, steps=25, folder=tmp_path, name="run").run
    rule = ("--tokens", 30, "--temperature", 0.2, "--json")
    prompts = ("--prompt", "the model ", "--prompt", "a model reads a ")

    def answered(*more: Any) -> Any:
        return json.loads(forge("generate", run, *rule, *more).out)

    stop = answered(*prompts[:2])["text"][14:17]
    for asked in (("--logprobs", *prompts), (*prompts[:2], "--stop", stop)):
        plain, guessed = answered(*asked), answered(*asked, "--lookup", 4)
        counts = guessed.pop("drafts")
        assert 0 < counts["accepted"] < counts["proposed"]
        for one in (plain, guessed):
            del one["tokens_per_second"]
        assert guessed == plain
    assert plain["stopped"] == "stop"
    found = generate(run, ["the model "], tokens=30, temperature=0, lookup=4)
    assert found.answers == generate(run, ["the model "], tokens=30, temperature=0).answers
    assert found.drafts["accepted"] > 0
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "the model "}) + "\n", encoding="utf-8")
    for name, more in (("plain", ()), ("guessed", ("--lookup", 4))):
        said = forge("generate", run, "--from-file", file, "--out", tmp_path / name, "--tokens", 30, *more)
    assert (tmp_path / "guessed").read_bytes() == (tmp_path / "plain").read_bytes()
    assert "drafts accepted" in said.out
