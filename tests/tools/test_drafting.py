"""Generation with drafts: the same tokens as without, as many guesses right as modules give without a cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from crossed import crossed
from forge_train import ConfigError
from forge_train_cli.app import run as forge
from forge_train_kit import hookspecs
from forge_train_tools.generation.completion import Completion
from forge_train_tools.generation.sampling import Sampling
from forge_train_tools.testing import TinyRun, run_forge

MODELS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "gqa": ((), {}),
    "mla, tied, LayerNorm": (
        ("mla",),
        {"mla.kv_rank": 8, "mla.rope_dim": 4, "decoder.kv_heads": 4, "decoder.tied": True, "decoder.norm": "layer"},
    ),
    "experts": (("moe",), {"moe.experts": 4}),
}


def trained(folder: Path, plugins: tuple[str, ...], config: dict[str, Any], steps: int = 25) -> TinyRun:
    values = {"mtp.depths": 3, "adamw.lr": 0.02, **config}
    return run_forge(("mtp", *plugins), values, steps=steps, folder=folder, name="drafts")


@pytest.fixture(scope="module", params=list(MODELS))
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return trained(tmp_path_factory.mktemp("runs"), *MODELS[request.param])


def completed(run: TinyRun, prompt: str, **sampling: Any) -> Completion:
    completion = Completion(run.job, run.model, prompt, Sampling(temperature=0, **sampling))
    assert "".join(completion) == completion.text
    return completion


def accepted_by_hand(run: TinyRun, ids: list[int], start: int, drafts: int) -> tuple[int, int]:
    """Guesses and right ones on the way to a text whose first tokens are the prompt, each module called on everything
    there is, without a cache."""
    part: Any = run.model.parts[0].eval()
    proposed = right = 0
    known = start
    while known + 1 < len(ids):
        hidden, have = part(torch.tensor([ids[:known]])), ids[: known + 1]
        positions = torch.arange(known)[None]
        for depth in range(drafts):
            after = torch.tensor([have[depth + 1 : depth + 1 + known]])
            hidden, normed = part.tail.draft(depth, hidden, after, positions, None)
            have = [*have, int(part.head(normed[:, -1:])[0, -1, : hookspecs.tokenizer(run.job).vocabulary].argmax())]
        guesses = have[known + 1 :][: len(ids) - known - 2]
        agree = next((at for at, one in enumerate(guesses) if ids[known + 1 + at] != one), len(guesses))
        proposed, right, known = proposed + len(guesses), right + agree, known + agree + 1
    return proposed, right


@pytest.mark.slow
@pytest.mark.parametrize(("drafts", "prompt"), crossed([1, 3], ["a", "the model reads a "]))
def test_the_text_is_the_same_and_so_are_the_guesses(run: TinyRun, drafts: int, prompt: str) -> None:
    tokens = 45 - len(prompt)
    plain, drafted = completed(run, prompt, tokens=tokens), completed(run, prompt, tokens=tokens, drafts=drafts)
    assert (drafted.text, drafted.tokens, drafted.stopped) == (plain.text, plain.tokens, plain.stopped)
    assert plain.drafts.proposed == 0
    text = [*hookspecs.tokenizer(run.job).begin, *(prompt + plain.text).encode()]
    assert len(text) == len(prompt) + plain.tokens
    told = (drafted.drafts.proposed, drafted.drafts.accepted)
    with torch.no_grad():
        assert told == accepted_by_hand(run, text, len(text) - plain.tokens, drafts)


@pytest.mark.slow
def test_drafts_save_passes_of_the_model(tmp_path: Path) -> None:
    run = trained(tmp_path, (), {}, steps=80)
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    run.model.parts[0].register_forward_hook(count)
    drafted = completed(run, "the model ", tokens=48, drafts=2)
    assert drafted.drafts.accepted > 8
    assert passes == 48 - drafted.drafts.accepted


def test_stops_and_ends_as_without(run: TinyRun) -> None:
    plain = completed(run, "the ", tokens=30)
    stop = plain.text[7:9]
    drafted = completed(run, "the ", tokens=30, drafts=2, stop=(stop,))
    assert drafted.stopped == "stop"
    assert drafted.text == plain.text[: plain.text.index(stop)]


def test_the_command_says_how_many_were_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(tmp_path, (), {"checkpoint.every": 10}, steps=10)
    arguments = ["generate", str(run.run), "--prompt", "the ", "--tokens", "12", "--temperature", "0", "--json"]
    assert forge(arguments) == 0
    plain = json.loads(capsys.readouterr().out)
    assert forge([*arguments, "--drafts", "2"]) == 0
    drafted = json.loads(capsys.readouterr().out)
    assert drafted["text"] == plain["text"]
    assert drafted["drafts"]["proposed"] > 0
    assert "drafts" not in plain


def test_answers_to_several_prompts_are_those_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Drawn ones, with a penalty, to a file and on the screen; a file continues with other drafts."""
    run = trained(tmp_path, (), {"checkpoint.every": 25})
    rule = ["--samples", "2", "--tokens", "14", "--temperature", "0.4", "--repetition-penalty", "1.05", "--logprobs"]
    prompts = ["--prompt", "the ", "--prompt", "a", "--prompt", "model reads "]

    def answers(*more: str) -> Any:
        assert forge(["generate", str(run.run), *rule, *more]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    plain, drafted = (json.loads(answers(*prompts, "--json", *more)) for more in ((), ("--drafts", "3")))
    assert drafted["answers"] == plain["answers"]
    assert 0 < drafted["drafts"]["accepted"] < drafted["drafts"]["proposed"]
    assert "drafts" not in plain
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in prompts[1::2]), encoding="utf-8")
    for name, more in (("plain", ()), ("drafted", ("--drafts", "2", "--batch", "2"))):
        told = answers("--from-file", str(file), "--out", str(tmp_path / name), *more)
    assert (tmp_path / "drafted").read_bytes() == (tmp_path / "plain").read_bytes()
    assert "drafts accepted" in told


def test_what_can_not_draft_says_why(run: TinyRun, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"4 drafts were requested; the model's modules can draft at most 3 tokens"):
        completed(run, "the ", drafts=4)
    bare = run_forge((), steps=1, folder=tmp_path)
    with pytest.raises(ConfigError, match=r"without modules that predict further tokens"):
        completed(bare, "the ", drafts=1)
