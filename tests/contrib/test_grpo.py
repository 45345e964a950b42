"""Rollouts of `grpo`: the same on every layout, resumed bit for bit, and better from step to step; and bad input."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import grpo_cases
from crossed import marked
from forge_train import ConfigError
from forge_train.base.errors import ForgeError
from forge_train_contrib._grpo.gym import Gym
from forge_train_contrib._grpo.rollouts import forget
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.testing import Pool, RunForge, assert_conforms
from grpo_cases import RULES

LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2": {"plugins": ["fsdp2"], "config": {"parallel.dp_shard": 2}},
    "ddp": {"plugins": ["ddp"], "config": {"parallel.dp_replicate": 2}},
    "tp": {"plugins": ["tp"], "config": {"parallel.tp": 2}},
    "cp": {"plugins": ["cp", "fsdp2"], "config": {"parallel.cp": 2}},
    "pp": {"plugins": ["pp"], "config": {"parallel.pp": 2, "grpo.kl": 0.0}},
}
ALL: dict[str, Any] = {
    "grpo.stale": 1,
    "grpo.kl": 0.1,
    "train.evaluate_every": 3,
    "grpo.held_out": 0.3,
    "grpo.temperature": 0.8,
    "grpo.top_k": 200,
    "grpo.top_p": 0.9,
    "grpo.min_p": 0.02,
    "grpo.repetition_penalty": 1.2,
    "train.sequence": 24,
}
"""What there is to differ. Answers to each prompt lie in slices of two ranks of context parallelism."""


@pytest.mark.slow
def test_it_conforms(tmp_path: Path) -> None:
    assert_conforms("grpo", grpo_cases.settings(tmp_path))


@pytest.mark.slow
def test_the_reward_rises(run_forge: RunForge, tmp_path: Path) -> None:
    config = grpo_cases.settings(
        tmp_path, **{"grpo.group": 8, "train.global_batch": 32, "grpo.tokens": 2, "adamw.lr": 0.1}
    )
    run = run_forge(["grpo"], config, steps=12)
    rewards = [line["grpo.reward"] for line in run.metrics]
    assert rewards[0] < 0.5
    assert rewards[-1] > 0.9
    assert max(line["grpo.drift"] for line in run.metrics) < 1e-5
    lines = [json.loads(line) for line in (run.run / "artifacts" / "samples.jsonl").read_text().splitlines()]
    assert len(lines) == 4 * 12
    assert {"prompt", "answer", "reward"} <= lines[0].keys()


@pytest.mark.slow
def test_steps_do_not_depend_on_micro_batches(run_forge: RunForge, tmp_path: Path) -> None:
    """Nor on the number of answers that are generated at a time."""
    found = []
    base = grpo_cases.begun(str(tmp_path / "start"))
    for size, batch in ((2, 3), (8, 32)):
        more = {**ALL, "train.micro_batch": size, "grpo.batch": batch, "train.init_from": base}
        found.append(run_forge(["grpo"], grpo_cases.settings(tmp_path, **more), steps=4))
    one, other = (run.plugin("grpo").state_dict() for run in found)
    assert one["tokens"].tolist() == other["tokens"].tolist()
    for mine, theirs in zip(*(run.metrics for run in found), strict=True):
        for name in ("loss", "grad_norm", "grpo.kl", "grpo.entropy"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6)


@pytest.fixture(scope="module")
def base(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("base")
    (said,) = ranks.run("grpo_cases:begun", 1, folder=str(folder))
    return str(said)


@pytest.fixture(scope="module")
def alone(ranks: Pool, base: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[float], dict[str, Any]]:
    """What one process learns with a weight of the divergence."""

    @cache
    def of(kl: float) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("alone")
        config = {**ALL, "train.init_from": base, "grpo.kl": kl}
        return dict(ranks.run("grpo_cases:trained", 1, folder=str(folder), config=config, steps=5)[0])

    return of


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("layout", marked(LAYOUTS, ["ddp", "tp"]))  # tp judges fresh answers below
def test_two_ranks_equal_one_process(
    ranks: Pool, tmp_path: Path, base: str, alone: Callable[[float], dict[str, Any]], layout: str
) -> None:
    """The same answers, rewards and losses."""
    more = LAYOUTS[layout]
    config = {**ALL, **more["config"], "train.init_from": base}
    whole = alone(config["grpo.kl"])
    both = ranks.run("grpo_cases:trained", 2, folder=str(tmp_path), plugins=more["plugins"], config=config, steps=5)
    for one in both:
        assert one["tokens"] == whole["tokens"]
        assert one["advantage"] == pytest.approx(whole["advantage"], rel=1e-6)
    exact = ("grpo.reward", "grpo.reward_std", "grpo.no_signal", "grpo.answer_tokens", "grpo.truncated")
    for mine, theirs in zip(both[0]["numbers"], whole["numbers"], strict=True):
        assert {name for name in mine if name.startswith("grpo.")} == {n for n in theirs if n.startswith("grpo.")}
        assert {name: mine[name] for name in exact if name in mine} == {n: theirs[n] for n in exact if n in theirs}
        for name in mine.keys() & {"loss", "grad_norm", "grpo.kl", "grpo.entropy"}:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
    for mine, theirs in zip(both[0]["evaluations"], whole["evaluations"], strict=True):
        assert mine["metrics"]["grpo.reward"] == theirs["metrics"]["grpo.reward"]
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4, abs=1e-6)


@pytest.fixture(scope="module")
def fresh(ranks: Pool, base: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    config = {"train.init_from": base}
    (found,) = ranks.run("grpo_cases:fresh", 1, folder=str(tmp_path_factory.mktemp("fresh")), plugins=[], config=config)
    return list(found)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["alone", pytest.param("fsdp2", marks=pytest.mark.extended), "tp"])
def test_ratios_of_fresh_answers_are_one_for_any_truncation(
    ranks: Pool, tmp_path: Path, base: str, fresh: list[dict[str, Any]], layout: str
) -> None:
    """To the bit, over temperature, top_k, top_p, min_p and repetition_penalty; what was kept of the drawing is what
    is learned."""
    if layout == "alone":
        every = [fresh]
    else:
        more = LAYOUTS[layout]
        config = {**more["config"], "train.init_from": base}
        every = ranks.run("grpo_cases:fresh", 2, folder=str(tmp_path), plugins=more["plugins"], config=config)
    for rule, mine, theirs in (each for found in every for each in zip(RULES, found, fresh, strict=True)):
        assert set(mine["ratios"]) == {1.0}, rule
        assert 0 < mine["grpo.drift"] < 1e-5, rule
        for name in ("loss", "grad_norm", "grpo.entropy"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), (name, rule)


@pytest.mark.dist
@pytest.mark.slow
def test_goes_on_in_the_middle_of_a_rollout(ranks: Pool, tmp_path: Path, base: str) -> None:
    """Stopped after the first of three steps that a rollout serves, and resumed bit for bit."""
    more = {"config": {**ALL, "grpo.stale": 2, "train.init_from": base}, "steps": 5, "name": "run"}
    (whole,) = ranks.run("grpo_cases:trained", 1, folder=str(tmp_path / "whole"), **more)
    ranks.run("grpo_cases:trained", 1, folder=str(tmp_path / "cut"), stop_at=4, **more)
    (resumed,) = ranks.run("grpo_cases:trained", 1, folder=str(tmp_path / "cut"), **more)
    for key in ("tokens", "advantage", "weights", "numbers", "evaluations"):
        if key != "evaluations":
            assert resumed[key] == whole[key], key
    assert [one["loss"] for one in resumed["evaluations"]] == [one["loss"] for one in whole["evaluations"]]


def test_an_evaluation_gives_the_reward_of_held_out_prompts(run_forge: RunForge, tmp_path: Path) -> None:
    """It repeats, and changes nothing of the training."""
    config = grpo_cases.settings(tmp_path, **{"grpo.held_out": 0.3, "adamw.lr": 1e-9})
    plain = run_forge(["grpo"], config, steps=3)
    run = run_forge(["grpo"], {**config, "train.evaluate_every": 1}, steps=3)
    found = [event for event in run.events if event["event"] == "evaluation"]
    assert len({event["metrics"]["grpo.reward"] for event in found}) == 1
    assert 0 < found[0]["metrics"]["grpo.reward"] < 1
    assert run.numbers == plain.numbers


def test_prompts_without_a_signal_are_replaced(run_forge: RunForge, tmp_path: Path) -> None:
    """Where no other gives one, they count for nothing."""
    config = grpo_cases.settings(tmp_path, **{"grpo.variant": "dapo", "grpo.rounds": 2})
    run = run_forge(["grpo"], {**config, "grpo.reward": "grpo_cases:late_letters"}, steps=2)
    assert all(0 < line["grpo.no_signal"] < 1 for line in run.metrics)
    state = run.plugin("grpo").state_dict()
    groups = (state["stop"] > state["first"]).view(-1, 4)
    assert groups.all(1).equal(groups.any(1)), "whole groups count, or none of their answers"
    assert state["advantage"].view(-1, 4)[groups.all(1)].any(1).all()
    silent = run_forge(["grpo"], {**config, "grpo.reward": "grpo_cases:zero"}, steps=1)
    assert silent.metrics[0]["loss"] == silent.metrics[0]["grad_norm"] == 0


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "not a number": (
        {"grpo.reward": "grpo_cases:text"},
        r"must return a number, and returned str 'good' for the prompt",
    ),
    "NaN": ({"grpo.reward": "grpo_cases:nan"}, r"returned nan for the prompt at .*prompts.jsonl, line \d"),
    "too few": ({"grpo.reward": "grpo_cases:few"}, r"was given 8 answers, and returned 7 rewards"),
    "an error": ({"grpo.reward": "grpo_cases:fails"}, r"grpo_cases:fails failed for the prompt at .*color"),
    "no function": ({"grpo.reward": "grpo_cases:earl"}, r"grpo_cases has no function 'earl'.*early"),
    "two arguments": ({"grpo.reward": "grpo_cases:two"}, r"must take three arguments: prompt, answer and record"),
    "no module": ({"grpo.reward": "no_such:f"}, r"grpo.reward.*no_such can't be imported"),
    "no name": ({"grpo.reward": "some_module"}, r"'some_module' names no function"),
    "group of one": ({"grpo.group": 1}, r"grpo.group"),
    "half groups": ({"grpo.group": 3}, r"a rollout has 8 answers, which are no whole groups of grpo.group = 3"),
    "too long": ({"grpo.tokens": 30}, r"line 1: the prompt has 3 tokens, and with an answer of grpo.tokens = 30"),
    "no prompts": ({"grpo.prompts": ""}, r"grpo.prompts.*required"),
    "no clipping": ({"grpo.clip_low": 0.3}, r"clip_low.*no effect with grpo.stale = 0"),
    "rounds": ({"grpo.rounds": 3}, r"rounds.*'dapo' only"),
    "no reference": ({"grpo.kl": 0.1}, r"starts from random weights, which can't be its reference"),
    "one token": ({"grpo.top_k": 1}, r"grpo.top_k: must be 0 or at least 2: a group drawn from one token"),
    "no share": ({"grpo.top_p": 0.0}, r"grpo.top_p"),
    "stored": ({"grpo.stored": "x.json"}, r"nobody knows the answers"),
    "two sources": ({"grpo.gym": "chain_sum", "grpo.reward": "exact"}, r"grpo.prompts.*no effect with grpo.gym"),
    "options of no task": ({"grpo.gym_options": {"size": 3}}, r"gym_options.*no effect without grpo.gym"),
    "no held-out prompt": ({"train.evaluate_every": 1}, r"no prompt is left for evaluation: raise grpo.held_out"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_told_in_a_sentence(run_forge: RunForge, tmp_path: Path, name: str) -> None:
    more, sentence = BAD[name]
    with pytest.raises((ConfigError, ForgeError), match=sentence) as found:
        run_forge(["grpo"], grpo_cases.settings(tmp_path, **more), steps=1)
    assert "\n" not in str(found.value).strip()


@pytest.mark.parametrize("asked", [{"grpo.kl": 0.1}, {"grpo.reward_model": "judge", "grpo.reward": "exact"}])
def test_a_second_model_beside_a_pipeline_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judge").mkdir()
    values = grpo_cases.settings(tmp_path, **{"parallel.pp": 2, "train.init_from": "a", "train.steps": 1, **asked})
    request = Request(plugins=("grpo", "pp"), set=tuple(f"{key}={value}" for key, value in values.items()))
    with pytest.raises(ConfigError, match=rf"{next(iter(asked))}: needs a second model, which a pipeline") as found:
        resolve(request, world=2)
    assert "\n" not in str(found.value).strip()


RECORDS: dict[str, tuple[list[Any], str]] = {
    "none": ([], r"grpo.prompts: .*prompts.jsonl has no record|is empty|no data"),
    "no prompt": ([{"question": "why"}], r"line 1: no string under 'prompt'"),
    "a system message": ([{"prompt": "why", "system": "Be brief."}], r"line 1: 'system' goes with messages; write"),
    "no answer": ([{"prompt": "why"}], r"line 1: has no text or number under 'answer'"),
    "nothing to answer": (
        [{"messages": [{"role": "assistant", "content": "Hi"}], "answer": "x"}],
        r"line 1: messages: expected a last message for the assistant to answer",
    ),
}


@pytest.mark.parametrize("name", RECORDS)
def test_bad_records_are_named(run_forge: RunForge, tmp_path: Path, name: str) -> None:
    records, sentence = RECORDS[name]
    config = grpo_cases.settings(tmp_path, **{"grpo.reward": "exact"})
    grpo_cases.written(tmp_path, records)
    with pytest.raises(ConfigError, match=sentence):
        run_forge(["grpo"], config, steps=1)


def test_a_chat_is_answered(run_forge: RunForge, tmp_path: Path) -> None:
    records = [{"messages": [{"role": "user", "content": f"Hi {at}"}], "answer": at} for at in range(3)]
    config = grpo_cases.settings(tmp_path, **{"grpo.template": "plain", "grpo.reward": "exact"})
    grpo_cases.written(tmp_path, records)
    run = run_forge(["grpo"], config, steps=1)
    line = json.loads((run.run / "artifacts" / "samples.jsonl").read_text().splitlines()[0])
    assert line["prompt"].startswith("User: Hi ")
    assert line["prompt"].endswith("Assistant:")


@pytest.mark.slow
def test_as_many_samples_as_were_asked_for_are_kept(run_forge: RunForge, tmp_path: Path) -> None:
    """One step has eight answers in two groups."""
    for samples, kept in ((1, 1), (4, 4), (6, 6), (100, 8)):
        config = grpo_cases.settings(tmp_path, **{"grpo.samples": samples})
        run = run_forge(["grpo"], config, steps=1, name=f"s{samples}")
        assert len((run.run / "artifacts" / "samples.jsonl").read_text().splitlines()) == kept


def test_a_function_may_reward_a_rollout_at_once(run_forge: RunForge, tmp_path: Path) -> None:
    each, together = (
        run_forge(["grpo"], grpo_cases.settings(tmp_path, **{"grpo.reward": f"grpo_cases:{name}"}), steps=2)
        for name in ("early", "early_of_all")
    )
    assert each.numbers == together.numbers


def test_samples_that_are_made_again_are_kept_once(tmp_path: Path) -> None:
    """A run that was killed makes the rollouts after its last checkpoint again."""
    file = tmp_path / "samples.jsonl"
    lines = [json.dumps({"rollout": at}) + "\n" for at in (0, 0, 1, 2)]
    file.write_text("".join(lines) + '{"rollout": 3, "pro', encoding="utf-8")
    forget(file, 1)
    assert file.read_text(encoding="utf-8") == "".join(lines[:2])


def gym(name: str = "chain_sum", **options: Any) -> dict[str, Any]:
    """A task of reasoning-gym, whose questions are longer than a tiny row."""
    length = {"train.sequence": 128, "decoder.max_sequence": 128}
    return {"grpo.gym": name, "grpo.gym_options": {"size": 6, **options}, "grpo.reward": "exact", **length}


def test_a_task_of_reasoning_gym_has_prompts_and_rewards(run_forge: RunForge, tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    config = grpo_cases.settings(tmp_path, **gym(max_terms=2, max_digits=1))
    run = run_forge(["grpo"], {**config, "grpo.prompts": ""}, steps=2)
    assert run.metrics[0]["grpo.reward"] >= 0
    entry = {"question": "1 + 2?", "answer": "3", "metadata": {}}
    scores = Gym("chain_sum", {}, 0)([""] * 2, [" 3\n", "4"], [entry] * 2, [""] * 2)
    assert scores[0] == 1 > scores[1]
    with pytest.raises(ConfigError, match=r"no task 'chain_sun'.*chain_sum"):
        Gym("chain_sun", {}, 0)
    with pytest.raises(ConfigError, match=r"grpo.gym_options: chain_sum refuses \{'min_terms': 0\}"):
        Gym("chain_sum", {"min_terms": 0}, 0)


def test_reasoning_gym_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"grpo.gym needs reasoning-gym: pip install 'forge-train\[rl\]'"):
        Gym("chain_sum", {}, 0)
