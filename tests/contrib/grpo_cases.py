"""Rewards, and what the tests of `grpo` have several ranks do."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_train_contrib._grpo import task
from forge_train_contrib._grpo.rollouts import Rollout, Rollouts
from forge_train_contrib._grpo.rule import Rule
from forge_train_kit.model import full_tensor
from forge_train_tools.testing import TinyRun, run_forge

VOCABULARY = 320
"""Logits of the model: more than there are tokens."""
WORDS = ("one", "three and four", "a", "some longer words")


def early(prompt: str, answer: str, record: Mapping[str, Any]) -> float:
    """The share of characters that come before the middle of ASCII; none in an empty answer."""
    return sum(ord(one) < 64 for one in answer) / max(len(answer), 1)


def early_of_all(prompts: list[str], answers: list[str], records: list[Mapping[str, Any]]) -> list[float]:
    """The same, of a whole rollout."""
    return [early(*one) for one in zip(prompts, answers, records, strict=True)]


def late_letters(prompt: str, answer: str, record: Mapping[str, Any]) -> float:
    """1 for some answers to some prompts, and 0 for all others."""
    return float(len(prompt) > 3 and any(ord(one) >= 96 for one in answer[:1]))


def zero(prompt: str, answer: str, record: Mapping[str, Any]) -> int:
    return 0


def nan(prompt: str, answer: str, record: Mapping[str, Any]) -> float:
    return float("nan")


def text(prompt: str, answer: str, record: Mapping[str, Any]) -> Any:
    return "good"


def few(prompts: list[str], answers: list[str], records: list[Any]) -> list[float]:
    return [1.0] * (len(answers) - 1)


def fails(prompt: str, answer: str, record: Mapping[str, Any]) -> float:
    raise KeyError("color")


def two(prompt: str, answer: str) -> float:
    return 1.0


def written(folder: Path, records: Sequence[Any] | None = None) -> str:
    """A file of prompts."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "prompts.jsonl"
    found = [{"prompt": word, "answer": "x"} for word in WORDS] if records is None else records
    file.write_text("".join(json.dumps(one) + "\n" for one in found), encoding="utf-8")
    return str(file)


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    """Of a run whose answers have up to five bytes."""
    return {
        "grpo.prompts": written(folder),
        "grpo.reward": "grpo_cases:early",
        "grpo.group": 4,
        "grpo.tokens": 5,
        "grpo.held_out": 0.0,
        "train.global_batch": 8,
        "train.evaluate_every": 0,
        "adamw.lr": 1e-2,
        "decoder.vocabulary": VOCABULARY,
        **more,
    }


def trained(
    folder: str, plugins: Sequence[str] = (), config: Mapping[str, Any] | None = None, steps: int = 3, **more: Any
) -> dict[str, Any]:
    """Train, and say what was learned from and what came of it."""
    values = settings(Path(folder), **(config or {}))
    run: TinyRun = run_forge(["grpo", *plugins], values, steps=steps, folder=Path(folder), **more)
    rollout = run.plugin("grpo").state_dict()
    weights = {name: full_tensor(one).detach() for name, one in run.model.named_parameters()}
    return {
        "numbers": run.numbers,
        "tokens": rollout["tokens"].tolist(),
        "advantage": rollout["advantage"].tolist(),
        "weights": {name: one.tolist() for name, one in weights.items()},
        "evaluations": [event for event in run.events if event["event"] == "evaluation"],
        "run": str(run.run),
    }


RULES = [
    *product((0.5, 1.5), (0, 40), (1.0, 0.8), (0.0, 0.05), (1.0,)),
    (0.8, 0, 1.0, 0.0, 1.7),
    (0.5, 40, 0.8, 0.05, 0.6),
]
"""Temperature, top_k, top_p, min_p and repetition_penalty."""


def fresh(folder: str, plugins: Sequence[str], config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Take a step with each rule of `RULES`: its ratios, and the metrics."""
    ratios, make, rule, seen = task.ratios, Rollouts.make, [Rule(1.0, 1)], list[list[float]]()

    def made(self: Rollouts, model: Any, side: Any, number: int, rows: int) -> Rollout:
        temperature, *others = RULES[number]
        self._rule = rule[0] = Rule(temperature, self._tokenizer.vocabulary, *others)
        seen.append([])
        return make(self, model, side, number, rows)

    def kept(*of: torch.Tensor) -> torch.Tensor:
        seen[-1] += (found := ratios(*of)).flatten().tolist()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rollouts, "make", made)
        patch.setattr(task, "ratios", kept)
        patch.setattr(task.Answers, "rule", property(lambda self: rule[0]))
        ended = trained(folder, plugins, {**config, "adamw.lr": 1e-6}, steps=len(RULES))
    return [{"ratios": one, **numbers} for one, numbers in zip(seen, ended["numbers"], strict=True)]


def judge(folder: str, **more: Any) -> str:
    """A run of a reward model, wider and deeper than the run's model."""
    words = "".join(
        json.dumps({"prompt": word, "chosen": " early 0123", "rejected": " zz top"}) + "\n" for word in WORDS * 4
    )
    Path(folder).mkdir(parents=True, exist_ok=True)
    (file := Path(folder) / "pairs.jsonl").write_text(words, encoding="utf-8")
    config = {
        "text_pairs.path": str(file),
        "text_pairs.template": "plain",
        "train.sequence": 64,
        "checkpoint.every": 20,
        "decoder.dim": 48,
        "decoder.layers": 3,
        "decoder.max_sequence": 80,
        "adamw.lr": 1e-2,
        "train.global_batch": 8,
        **more,
    }
    return str(run_forge(["reward", "text_pairs"], config, steps=20, folder=Path(folder)).run)


def begun(folder: str) -> str:
    """A run to start from."""
    config = {"checkpoint.every": 1, "decoder.vocabulary": VOCABULARY}
    return str(run_forge(steps=1, folder=Path(folder), config=config).run)
