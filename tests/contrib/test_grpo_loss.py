"""The losses of `grpo` and their gradients against the papers' formulas, token by token in fp64."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from forge_train import MASKED
from forge_train.contract.batch import TOKENS
from forge_train_contrib._grpo.loader import ADVANTAGE, DRAWN, STALE, with_rows
from forge_train_contrib._grpo.rollouts import EPSILON, advantages, penalty
from forge_train_contrib._grpo.rule import Answer, Rule
from forge_train_kit.metrics import Mean
from forge_train_tools.generation.draws import uniform
from grpo_math import KNOWN, LENGTHS, WORDS, by_hand, case, task_of

pytestmark = [pytest.mark.unit]


@pytest.mark.parametrize("chunk", [0, 8, 1000])
@pytest.mark.parametrize("kl", [0.0, 0.3])
@pytest.mark.parametrize("variant", ["grpo", "dr_grpo", "dapo"])
def test_losses_and_gradients_are_those_of_the_papers(variant: str, kl: float, chunk: int) -> None:
    options = {"variant": variant, "kl": kl, "temperature": 0.6, "stale": 1, "clip_high": 0.28, "tokens": 7}
    part, hidden, batch = case()
    task = task_of(**options, chunk=chunk)
    given = [hidden, part["head"].weight]
    loss = task.loss(part, hidden, batch)
    wanted, weight = by_hand(part, hidden, batch, task.config, task.job.models.get("reference"))
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=1e-7)
    assert task.weight(batch) == weight
    for mine, theirs in zip(torch.autograd.grad(loss, given), torch.autograd.grad(wanted, given), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_the_ratio_of_a_fresh_answer_is_exactly_one(temperature: float) -> None:
    """Nothing that was kept of it counts: its loss is its advantage to the bit, and so are gradients."""
    part, hidden, batch = case(stale=(False,) * 4)
    task = task_of(variant="grpo", temperature=temperature)
    loss = task.loss(part, hidden, batch)
    (mine,) = torch.autograd.grad(loss, hidden)
    poisoned = batch.with_targets({DRAWN: torch.full((4, 10), float("nan"))}, axes=TOKENS)
    (theirs,) = torch.autograd.grad(task.loss(part, hidden, poisoned), hidden)
    assert torch.equal(mine, theirs)
    assert mine.isfinite().all()
    dapo = task_of(variant="dapo", temperature=temperature).loss(part, hidden, batch)
    learned = (batch.labels != MASKED).sum(1)
    assert float(dapo.detach()) == -float((batch.targets[ADVANTAGE] * learned).sum())


def test_the_metrics_are_those_of_the_tokens() -> None:
    part, hidden, batch = case()
    observed = {name: Mean() for name in ("entropy", "kl", "clipped", "drift")}
    task = task_of(observed, kl=0.1, stale=1)
    task.loss(part, hidden, batch)
    learned, stale = batch.labels != MASKED, batch.targets[STALE][:, None]
    logits = part["head"](hidden).double()[..., :KNOWN].log_softmax(-1)
    now = logits.gather(-1, batch.labels.clamp(min=0)[..., None])[..., 0]
    ratio = torch.where(stale, (now - batch.targets[DRAWN]).exp(), 1.0)
    better = batch.targets[ADVANTAGE][:, None] > 0
    clipped = torch.where(better, ratio > 1.2, ratio < 0.8)
    reference = task.job.models["reference"]
    theirs = reference.parts[0]["head"](reference(batch.inputs)).double()[..., :KNOWN].log_softmax(-1)
    apart = theirs.gather(-1, batch.labels.clamp(min=0)[..., None])[..., 0] - now
    wanted = {
        "entropy": -(logits.exp() * logits).sum(-1)[learned].mean(),
        "kl": (apart.exp() - apart - 1)[learned].mean(),
        "clipped": clipped[learned].double().mean(),
        "drift": (now - batch.targets[DRAWN]).abs()[learned & ~stale].mean(),
    }
    assert 0 < float(wanted["clipped"]) < 1
    for name, value in wanted.items():
        assert observed[name].value(observed[name].sums, observed[name].maxima) == pytest.approx(float(value), rel=1e-5)


def test_a_row_that_does_not_count_gives_nothing() -> None:
    part, hidden, batch = case()
    batch.labels[1] = MASKED
    batch = with_rows(batch)
    for variant in ("grpo", "dr_grpo", "dapo"):
        task = task_of(variant=variant, stale=1)
        (gradient,) = torch.autograd.grad(task.loss(part, hidden, batch), hidden)
        assert not gradient[1].any()
        assert gradient.isfinite().all()
        assert task.weight(batch) == (sum(LENGTHS) - 1 if variant == "dapo" else 3)


def test_advantages_are_relative_to_the_group() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5], [3.0, -1.0, 0.0, 0.0]]).double()
    scaled, centred = advantages(rewards, scaled=True), advantages(rewards, scaled=False)
    for row, group in enumerate(rewards.tolist()):
        mean = sum(group) / 4
        deviation = (sum((one - mean) ** 2 for one in group) / 3) ** 0.5
        assert centred[row].tolist() == pytest.approx([one - mean for one in group])
        assert scaled[row].tolist() == pytest.approx([(one - mean) / (deviation + EPSILON) for one in group])


@pytest.mark.parametrize(("length", "lost"), [(1, 0.0), (12, 0.0), (13, 0.125), (16, 0.5), (20, 1.0)])
def test_the_end_of_a_long_answer_costs(length: int, lost: float) -> None:
    assert penalty(length, 20, 8) == lost
    assert penalty(length, 20, 0) == 0


def test_tokens_are_drawn_from_the_distribution_that_is_learned() -> None:
    """Frequencies of many draws, and the log-probabilities that are kept."""
    torch.manual_seed(0)
    logits, rule = torch.randn(WORDS) * 2, Rule(0.7, KNOWN)
    known = (logits[:KNOWN].double() / 0.7).log_softmax(0)
    counts = torch.zeros(WORDS)
    for number in range(4000):
        row = Answer(number, (1, 2), 3, rule, frozenset({5}), seed=3)
        token, log_probability, drawable = row.choose(logits)
        assert drawable is None
        counts[token] += 1
        assert log_probability == pytest.approx(float(known[token]), abs=1e-6)
    assert not counts[KNOWN:].any(), "ids that are no tokens are never drawn"
    torch.testing.assert_close(counts[:KNOWN] / 4000, known.exp().float(), atol=0.025, rtol=0)


def test_a_draw_depends_on_its_place_alone() -> None:
    places = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    assert len({uniform(*one) for one in places}) == 4
    assert [uniform(*one) for one in places] == [uniform(*one) for one in places]


def test_an_answer_ends_with_its_token_or_its_length() -> None:
    row = Answer(0, (1, 2), 3, Rule(1.0, KNOWN), frozenset({5}), seed=0)
    row.add((4, -1.0, None))
    assert not row.done
    row.add((5, -2.0, None))
    assert row.done
    assert (row.ended, row.answer, row.drawn) == (True, [4, 5], [-1.0, -2.0])
    row = Answer(0, (1, 2), 1, Rule(1.0, KNOWN), frozenset({5}), seed=0)
    row.add((4, -1.0, None))
    assert (row.done, row.ended) == (True, False)


@pytest.mark.parametrize("variant", ["grpo", "dr_grpo", "dapo"])
def test_losses_and_gradients_are_those_of_trl(variant: str) -> None:
    """Its `_compute_loss`, from the same log-probabilities of one micro-batch."""
    trainer = pytest.importorskip("trl.trainer.grpo_trainer")
    part, hidden, batch = case(stale=(True,) * 4)
    task = task_of(variant=variant, kl=0.2, stale=1, clip_high=0.28, tokens=10)
    learned, reference = batch.labels != MASKED, task.job.models["reference"]
    places = batch.labels.clamp(min=0)[..., None]

    def scores(head: nn.Module, states: Tensor) -> Tensor:
        return head(states).double()[..., :KNOWN].log_softmax(-1).gather(-1, places)[..., 0]

    now, given = scores(part["head"], hidden), [hidden, part["head"].weight]
    alone = SimpleNamespace(gather=lambda one: one, reduce=lambda one, reduction: one, num_processes=1)
    fake = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (now, torch.zeros_like(now), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=0.2,
        loss_type=variant,
        epsilon_low=0.2,
        epsilon_high=0.28,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None),
        use_vllm=False,
        model=SimpleNamespace(training=False),
        max_completion_length=10,
        accelerator=alone,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    inputs = {
        **dict.fromkeys(("prompt_ids", "prompt_mask"), batch.inputs[:, :0]),
        "completion_ids": batch.inputs,
        "completion_mask": learned.long(),
        "advantages": batch.targets[ADVANTAGE],
        "old_per_token_logps": batch.targets[DRAWN].double(),
        "ref_per_token_logps": scores(reference.parts[0]["head"], reference(batch.inputs)),
        "num_items_in_batch": learned.sum(),
    }
    theirs = trainer.GRPOTrainer._compute_loss(fake, None, inputs)
    mine = task.loss(part, hidden, batch) / task.weight(batch)
    torch.testing.assert_close(mine.double(), theirs, rtol=1e-6, atol=1e-7)
    for one, other in zip(torch.autograd.grad(mine, given), torch.autograd.grad(theirs, given), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
