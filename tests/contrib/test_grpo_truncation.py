"""Answers that are drawn from a truncated distribution, and the loss of these."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forge_train import MASKED, Batch
from forge_train.contract.batch import Axes
from forge_train_contrib._grpo.loader import DRAWABLE
from forge_train_contrib._grpo.rule import Answer, Drawable, Rule
from forge_train_contrib._grpo.task import log_probabilities, ratios
from forge_train_tools.generation.sampling import Distribution
from grpo_math import DIM, KNOWN, by_hand, case, filled, task_of

pytestmark = [pytest.mark.unit]


def truncated(batch: Batch) -> tuple[Batch, list[list[list[int]]]]:
    """The batch with some of the tokens that each label could be drawn from, and these: none where all could."""
    torch.manual_seed(2)
    ids = [
        [sorted({token, *torch.randperm(KNOWN)[: at % 5].tolist()}) if token != MASKED and at % 4 else []]
        for at, token in enumerate(batch.labels.flatten().tolist())
    ]
    entries = [[place, one] for place, (found,) in enumerate(ids) for one in found]
    length = batch.labels.shape[1]
    by_row = [[one[0] for one in ids[start : start + length]] for start in range(0, len(ids), length)]
    return batch.with_targets({DRAWABLE: torch.tensor(entries)}, axes=Axes(batch=None)), by_row


@pytest.mark.parametrize("penalty", [1.0, 1.7])
@pytest.mark.parametrize("chunk", [0, 8])
@pytest.mark.parametrize("variant", ["grpo", "dapo"])
def test_what_could_not_be_drawn_takes_no_part(variant: str, chunk: int, penalty: float) -> None:
    """Loss and gradients are those of the formula over the kept logits alone, with fresh and stale answers and with a
    reference."""
    options: dict[str, Any] = {"variant": variant, "kl": 0.3, "temperature": 0.6, "stale": 1, "top_p": 0.9}
    options["repetition_penalty"] = penalty
    part, hidden, batch = case()
    batch, drawable = truncated(batch)
    task = task_of(**options, chunk=chunk)
    given = [hidden, part["head"].weight]
    loss = task.loss(part, hidden, batch)
    wanted, weight = by_hand(part, hidden, batch, task.config, task.job.models["reference"], drawable)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=1e-7)
    assert task.weight(batch) == weight
    for mine, theirs in zip(torch.autograd.grad(loss, given), torch.autograd.grad(wanted, given), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        assert mine.isfinite().all()


TRUNCATIONS: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"top_k": 9, "top_p": 0.8},
    {"top_k": 9, "min_p": 0.1},
    {"top_p": 0.9, "min_p": 0.1},
    {"top_k": 12, "top_p": 0.9, "min_p": 0.05},
    {"repetition_penalty": 1.6},
    {"repetition_penalty": 0.5},
    {"repetition_penalty": 1.6, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
)


@pytest.mark.parametrize("truncation", TRUNCATIONS)
@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.0])
def test_a_drawn_token_is_learned_with_the_probability_that_it_was_drawn_with(
    temperature: float, truncation: dict[str, Any]
) -> None:
    """Frequencies of draws agree with `Distribution`, log-probabilities with the loss, and ratios are exactly 1."""
    torch.manual_seed(0)
    head, hidden = filled(2.0), torch.randn(2, 6, DIM)
    rule = Rule(temperature, KNOWN, **truncation)
    inputs, penalised, cut = torch.randint(KNOWN, (2, 6)), "repetition_penalty" in truncation, rule.truncates
    entries, labels, drawn = [], torch.zeros(2, 6, dtype=torch.int64), torch.zeros(2, 6)
    for place, logits in enumerate(head(hidden).detach().flatten(0, 1)):
        before = inputs[place // 6, : place % 6 + 1].tolist()
        token, drawn.flatten()[place], drawable = Answer(place, before, 1, rule, frozenset(), seed=1).choose(logits)
        labels.flatten()[place] = token
        known = Distribution.of(logits[:KNOWN], rule._sampling, before)
        assert token in known.ids
        assert (drawable is None) is (not cut)
        entries += [[place, one] for one in known.ids.tolist() if cut]
    kept = torch.tensor(entries) if cut else None
    found = Drawable(kept, 12, KNOWN, inputs if penalised else None) if truncation else None
    now, every = log_probabilities(rule, head(hidden), labels, torch.arange(12).view(2, 6), found)
    torch.testing.assert_close(now.float(), drawn, rtol=0, atol=2e-6)
    torch.testing.assert_close(every.exp().sum(-1), torch.ones(12))
    fresh = torch.zeros(2, 6, dtype=torch.bool)
    assert ratios(now, drawn, fresh).eq(1).all()
    assert not ratios(now, drawn - 0.5, ~fresh).eq(1).any()
