"""Rewards of `grpo` by a reward model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import chat_model
import grpo_cases
from forge_train import ConfigError
from forge_train.base.errors import ForgeError
from forge_train_contrib._grpo import prompts
from forge_train_contrib._grpo.judge import Judge
from forge_train_kit.data.chats import open_template
from forge_train_tools import infer
from forge_train_tools.offline.hf_import import import_checkpoint
from forge_train_tools.offline.huggingface import export_checkpoint
from forge_train_tools.testing import Pool, RunForge
from test_grpo import LAYOUTS

OF_MODEL = {"grpo.reward": "exact", "grpo.tokens": 9, "grpo.samples": 100, "train.evaluate_every": 0}
SHARED = {"grpo.reward": "exact", "grpo.batch": 3, "adamw.lr": 1e-6}


@pytest.fixture(scope="module")
def judge(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> str:
    (said,) = ranks.run("grpo_cases:judge", 1, folder=str(tmp_path_factory.mktemp("judge")))
    return str(said)


def samples(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "artifacts" / "samples.jsonl").read_text().splitlines()]


def bare(sample: dict[str, Any]) -> dict[str, Any]:
    """A chat that is the same text: `forge infer` ends chats as training does."""
    return {"messages": [{"role": "user", "content": sample["prompt"]}, said(sample["answer"])]}


def written(folder: Path) -> str:
    """A template that writes the messages alone."""
    file = folder / "bare.jinja"
    file.write_text("{% for one in messages %}{{ one['content'] }}{% endfor %}", encoding="utf-8")
    return str(file)


def inferred(judge: str, folder: Path, records: list[Any], **more: Any) -> list[float]:
    (folder / "asked.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    infer(judge, [str(folder / "asked.jsonl")], str(folder / "told.jsonl"), **more)
    return [json.loads(line)["reward"] for line in (folder / "told.jsonl").read_text().splitlines()]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "nothing there": ({"grpo.reward_model": "nowhere"}, r"grpo.reward_model: .*nowhere: there is no such run"),
    "a language model": (
        {"grpo.reward_model": "BASE"},
        r"grpo.reward_model: the head of the model in .* gives token_logi",
    ),
    "another vocabulary": (
        {"tokenizer.path": "WORDS"},
        r"grpo.reward_model: .* was trained with another tokenizer: the",
    ),
    "a short one": (
        {"train.sequence": 96, "decoder.max_sequence": 96},
        r"grpo.reward_model.: train.sequence: 96 tokens exceed decoder.max_sequence .80",
    ),
    "a function": ({"grpo.reward": "grpo_cases:early"}, r"grpo.reward: has no effect with grpo.reward_model, unless"),
    "a weight": ({"grpo.reward_model": "", "grpo.reward_weight": 0.5}, r"grpo.reward_weight: has no effect without"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_another_model_is_refused_in_a_sentence(
    ranks: Pool, run_forge: RunForge, tmp_path: Path, judge: str, name: str
) -> None:
    more, sentence = BAD[name]
    if more.get("grpo.reward_model") == "BASE":
        more = {"grpo.reward_model": grpo_cases.begun(str(tmp_path / "base"))}
    if "tokenizer.path" in more:
        (words := tmp_path / "words").mkdir()
        chat_model.write_tokenizer(words)
        more = {"tokenizer.path": str(words)}
    config = grpo_cases.settings(tmp_path, **{**OF_MODEL, "grpo.reward_model": judge, **more})
    with pytest.raises(ConfigError, match=sentence) as found:
        run_forge(["grpo"], config, steps=1)
    assert "\n" not in str(found.value).strip()


def test_an_imported_model_has_the_same_rewards(run_forge: RunForge, tmp_path: Path, judge: str) -> None:
    export_checkpoint(Path(judge), tmp_path / "hf")
    imported = import_checkpoint(tmp_path / "hf", tmp_path / "judge", plugins=("reward", "text_pairs")).path
    found = []
    for weights in (judge, imported):
        config = grpo_cases.settings(tmp_path, **{**OF_MODEL, "grpo.reward_model": str(weights)})
        found.append([one["reward"] for one in samples(run_forge(["grpo"], config, steps=1).run)])
    assert found[0] == found[1]


def test_a_damaged_model_is_named(
    run_forge: RunForge, tmp_path: Path, judge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Judge, "_rewards", lambda self, rows, longest: [float("nan")] * len(rows))
    with pytest.raises(ForgeError, match=r"grpo.reward_model: gave nan for the prompt at .*prompts.jsonl, line \d"):
        run_forge(["grpo"], grpo_cases.settings(tmp_path, **{**OF_MODEL, "grpo.reward_model": judge}), steps=1)


def test_rewards_are_those_of_infer(run_forge: RunForge, tmp_path: Path, judge: str) -> None:
    """Of texts, by a model of another size than the run's."""
    run = run_forge(["grpo"], grpo_cases.settings(tmp_path, **{**OF_MODEL, "grpo.reward_model": judge}), steps=3)
    found = samples(run.run)
    assert len({one["reward"] for one in found}) > 6
    wanted = inferred(judge, tmp_path, [bare(one) for one in found], template=written(tmp_path))
    assert [one["reward"] for one in found] == pytest.approx(wanted, abs=1e-6)


def test_a_chat_is_judged_as_infer_reads_it(run_forge: RunForge, tmp_path: Path, judge: str) -> None:
    chats = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Hi {at}"}] for at in range(3)]
    more = {**OF_MODEL, "grpo.reward_model": judge, "grpo.template": "plain", "train.sequence": 64}
    config = grpo_cases.settings(tmp_path, **{**more, "decoder.max_sequence": 64})
    grpo_cases.written(tmp_path, [{"messages": chat} for chat in chats])
    run = run_forge(["grpo"], config, steps=2)
    found = samples(run.run)
    asked = [[*chats[int(re.findall(r"Hi (\d)", one["prompt"])[0])], said(one["answer"])] for one in found]
    wanted = inferred(judge, tmp_path, [{"messages": chat} for chat in asked], template="plain")
    assert [one["reward"] for one in found] == pytest.approx(wanted, abs=1e-6)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings for a tokenizer whose template is ChatML."""
    chat_model.write_tokenizer(folder := tmp_path_factory.mktemp("words"))
    return {"tokenizer.path": str(folder), "decoder.vocabulary": 384, "train.sequence": 80, "decoder.max_sequence": 80}


HELLO = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.slow
def test_a_chat_is_judged_as_the_model_learned_to_read_it(
    run_forge: RunForge, tmp_path: Path, words: dict[str, Any]
) -> None:
    judge = grpo_cases.judge(str(tmp_path / "judge"), **words)
    config = grpo_cases.settings(tmp_path, **{**OF_MODEL, **words, "grpo.reward_model": judge})
    grpo_cases.written(tmp_path, [HELLO])
    found = samples(run_forge(["grpo"], config, steps=1).run)
    assert found[0]["prompt"].startswith("<|im_start|>user")
    asked = [{"messages": [*HELLO["messages"], said(one["answer"])]} for one in found]
    wanted = inferred(judge, tmp_path, asked)
    assert [one["reward"] for one in found] == pytest.approx(wanted, abs=1e-6)
    (tmp_path / "other").mkdir()
    assert inferred(judge, tmp_path / "other", asked, template="chatml") != pytest.approx(wanted, abs=1e-3)


def test_a_template_of_the_model_that_can_not_be_read_is_told(
    run_forge: RunForge, tmp_path: Path, judge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(choice: str, folder: Path | None) -> Any:
        if folder is not None and folder.is_relative_to(judge):
            raise ConfigError("the template can't be read")
        return open_template(choice, folder)

    monkeypatch.setattr(prompts, "open_template", opened)
    more = {**OF_MODEL, "grpo.reward_model": judge, "grpo.template": "plain", "train.sequence": 64}
    config = grpo_cases.settings(tmp_path, **{**more, "decoder.max_sequence": 64})
    grpo_cases.written(tmp_path, [HELLO])
    with pytest.raises(ConfigError, match="the template can't be read"):
        run_forge(["grpo"], config, steps=1)


def test_the_template_that_was_trained_with_goes_with_the_run(
    run_forge: RunForge, tmp_path: Path, words: dict[str, Any]
) -> None:
    config = grpo_cases.settings(tmp_path, **{**words, "grpo.template": "plain", "checkpoint.every": 1})
    grpo_cases.written(tmp_path, [HELLO])
    run = run_forge(["grpo"], config, steps=1)
    for folder in (run.run / "tokenizer", run.run / "checkpoints" / "step-00000001" / "tokenizer"):
        assert open_template("", folder).sources == open_template("plain", folder).sources


def test_a_template_without_a_chat_is_refused(run_forge: RunForge, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"grpo.template: no record of .*prompts.jsonl has messages; leave it out"):
        run_forge(["grpo"], grpo_cases.settings(tmp_path, **{"grpo.template": "plain"}), steps=1)


def said(answer: str) -> dict[str, str]:
    return {"role": "assistant", "content": answer}


def test_a_function_is_added_with_its_weight(run_forge: RunForge, tmp_path: Path, judge: str) -> None:
    more = {"grpo.reward_model": judge, "grpo.reward": "grpo_cases:early", "grpo.reward_weight": 0.25}
    run = run_forge(["grpo"], grpo_cases.settings(tmp_path, **{**OF_MODEL, **more}), steps=1)
    found = samples(run.run)
    wanted = inferred(judge, tmp_path, [bare(one) for one in found], template=written(tmp_path))
    functions = [grpo_cases.early(one["prompt"], one["answer"], {}) for one in found]
    assert any(functions)
    sums = [one + 0.25 * other for one, other in zip(wanted, functions, strict=True)]
    assert [one["reward"] for one in found] == pytest.approx(sums, abs=1e-6)


@pytest.fixture(scope="module")
def alone(ranks: Pool, judge: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone")
    config = {**SHARED, "grpo.reward_model": judge}
    return dict(ranks.run("grpo_cases:trained", 1, folder=str(folder), config=config, steps=2)[0])


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("layout", ["fsdp2", pytest.param("tp", marks=pytest.mark.extended)])
def test_two_ranks_judge_as_one_process(
    ranks: Pool, tmp_path: Path, judge: str, alone: dict[str, Any], layout: str
) -> None:
    """With shares of other sizes, the last of which is no whole one."""
    more = LAYOUTS[layout]
    config = {**SHARED, "grpo.reward_model": judge, **more["config"]}
    both = ranks.run("grpo_cases:trained", 2, folder=str(tmp_path), plugins=more["plugins"], config=config, steps=2)
    for one in both:
        assert one["tokens"] == alone["tokens"]
        assert one["advantage"] == pytest.approx(alone["advantage"], rel=1e-4, abs=1e-5)
    for mine, theirs in zip(both[0]["numbers"], alone["numbers"], strict=True):
        for name in ("grpo.reward", "grpo.reward_std", "loss", "grad_norm"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
