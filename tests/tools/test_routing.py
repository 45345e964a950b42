"""Choices told to `forge verify`: how they are counted, what is a tie, and what becomes of a verdict."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from forge_train.mesh.layout import Layout
from forge_train_kit.model import record_choices
from forge_train_kit.model.choices import heard_by
from forge_train_tools.verification import Verdict
from forge_train_tools.verification.against import compare_settings
from forge_train_tools.verification.compare import Exact, compare
from forge_train_tools.verification.follow import Followed
from forge_train_tools.verification.recording import Record, Recording
from forge_train_tools.verification.routing import (
    TIE,
    TIES,
    Counter,
    RoutingCounts,
    Step,
    near,
    routing_difference,
    tie_of,
)

pytestmark = pytest.mark.unit
LEVELS = (*TIES, 2**-4)
"""The last as of a plugin that rounds."""


class Best(nn.Module):
    """Chooses the best two of four for each token."""

    def forward(self, scores: Tensor) -> Tensor:
        record_choices(self, "best", lambda: (scores, best(scores)))
        return scores.sin()


def best(scores: Tensor, count: int = 2) -> Tensor:
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(count).indices, True)


def scores(tokens: int, seed: int = 0) -> Tensor:
    return torch.rand(tokens, 4, generator=torch.Generator().manual_seed(seed))


def told(rows: list[str], *calls: Tensor, micro_batch: int = 1, module: nn.Module | None = None) -> Step:
    """What is counted of calls in one step."""
    module = module or Best()
    counter = Counter([("layers.0.router", module)], rows, micro_batch)
    with heard_by(counter):
        for call in calls:
            module(call)
    return counter.end()


# -- ties -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([0.5, 0.3, 0.2, 0.1], [0, 0, 0, 0]),
        ([0.5, 0.3, 0.3 * (1 - 1e-6), 0.1], [1, 1, 1, 1]),
        ([0.5, 0.3, 0.3 - 0.5 * 2**-8, 0.1], [0, 0, 1, 1]),
        ([0.5, 0.3, 0.3 - 0.5 * 2**-5, 0.1], [0, 0, 0, 1]),
        ([0.3, 0.3, 0.3, 0.3], [2, 2, 2, 2]),
        ([0.5, 0.3, -math.inf, -math.inf], [0, 0, 0, 0]),
        ([0.5, 0.3, 0.2, -math.inf], [0, 0, 0, 0]),
    ],
)
def test_a_tie_is_what_rounding_may_turn(row: list[float], expected: list[int]) -> None:
    one = torch.tensor([row])
    assert list(near(one, best(one), "alternatives", ties=LEVELS).values()) == expected


def test_choices_among_tokens_and_of_everything() -> None:
    column = torch.tensor([[0.9], [0.5], [0.5], [0.1]])
    taken = torch.tensor([[True], [True], [False], [False]])
    assert near(column, taken, "tokens") == dict.fromkeys(TIES, 1)
    assert near(column, torch.ones_like(taken), "tokens") == dict.fromkeys(TIES, 0)


def test_at_later_steps_more_is_a_tie() -> None:
    one = torch.tensor([[0.5, 0.3, 0.3 - 0.5 * 2.5e-5, 0.1]])
    assert [near(one, best(one), "alternatives", step)[TIE] for step in (1, 2, 3)] == [0, 0, 1]


# -- counting -------------------------------------------------------------------------------------


def test_outside_of_verify_nothing_is_computed() -> None:
    def made() -> tuple[Tensor, Tensor]:
        raise AssertionError("nobody asks")

    record_choices(nn.Module(), "nothing", made)


def test_choices_are_counted_by_sequence() -> None:
    one, two = scores(6), scores(6, seed=1)
    (name, tally), *rest = told(["a", "b", "c", "a"], one, two, micro_batch=2).items()
    assert name == "best of layers.0.router"
    assert not rest
    counts = [best(part).sum(0).tolist() for part in (one[:3], one[3:], two[:3], two[3:])]
    again = [a + b for a, b in zip(counts[0], counts[3], strict=True)]
    assert tally.rows == {"a": [*again, 6], "b": [*counts[1], 3], "c": [*counts[2], 3]}


def test_what_is_not_made_of_sequences_is_counted_together() -> None:
    (tally,) = told(["a"], scores(6), scores(6), micro_batch=1).values()
    assert tally.rows.keys() == {"a", ""}
    assert sum(counts[-1] for counts in tally.rows.values()) == 12


def test_recompute_counts_once() -> None:
    module, counted = Best(), {}
    for name, run in (("plain", module), ("again", lambda x: checkpoint(module, x, use_reentrant=False))):
        counter = Counter([("", module)], ["a"], 1)
        with heard_by(counter):
            run(scores(6).requires_grad_()).sum().backward()
        counted[name] = counter.end()
    assert counted["again"] == counted["plain"]


def test_a_compiled_module_is_counted() -> None:
    module = Best()
    plain = told(["a"], scores(6), module=module)
    compiled: Any = torch.compile(module.forward, backend="eager")
    counter, compilations = Counter([("layers.0.router", module)], ["a"], 1), torch._dynamo.utils.counters["stats"]
    with heard_by(counter):
        compiled(scores(6))
        once = compilations["unique_graphs"]
        assert counter.end() == plain
        for _ in range(3):
            compiled(scores(6))
        assert compilations["unique_graphs"] == once
    (tally,) = counter.end().values()
    assert sum(counts[-1] for counts in tally.rows.values()) == 18
    compiled(scores(6))
    assert counter.end() == {}


# -- comparing ------------------------------------------------------------------------------------


def parted(one: list[list[Step]], other: list[list[Step]], allowed: float = TIE) -> Any:
    return routing_difference(one, other, allowed)


def test_slices_and_copies_count_once() -> None:
    whole = scores(8)
    one = [told(["a"], whole)]
    halves = [[told(["a"], half)] for half in whole.chunk(2)]
    assert parted([one], halves) is None
    assert parted([one], [one, one, one]) is None
    assert parted([one], [[told(["a"], whole[:4])], [told(["b"], whole[4:])]]) is not None


def moved(by: float) -> tuple[Tensor, Tensor]:
    """Scores of which three tokens' second best loses by so much."""
    one = torch.tensor([[0.5, 0.3, 0.3 - by, 0.1]]).repeat(3, 1)
    return torch.cat([one, scores(5)]), torch.cat([one[:, [0, 2, 1, 3]], scores(5)])


def test_the_first_of_a_step_is_named() -> None:
    """In the order of the forward pass, whatever the order of names."""
    one, other = (RoutingCounts({"a": [count, 4 - count, 4]}, dict.fromkeys(TIES, 4.0)) for count in (1.0, 3.0))
    ours: list[Step] = [{"z": one, "a": one}, {"z": one, "a": one}]
    assert parted([ours], [[ours[0], {"a": other, "z": one}]]).where == "a"
    found = parted([ours], [[ours[0], {"a": other, "z": other}]])
    assert (found.step, found.where, found.moved) == (2, "z", 2)


@pytest.mark.parametrize(("by", "tie"), [(1e-7, True), (1e-2, False)])
def test_a_tie_is_one_on_both_sides(by: float, tie: bool) -> None:
    right, left = ([told(["a"], side)] for side in moved(by))
    found = parted([right], [left])
    assert (found.moved, found.tie) == (3, tie)
    far, _ = moved(0.1)
    assert not parted([[told(["a"], far)]], [left]).tie


def test_copies_of_a_tie_are_not_more_ties() -> None:
    one = {"x": RoutingCounts({"a": [1, 3, 4]}, dict.fromkeys(TIES, 4.0))}
    twice = {"x": RoutingCounts({"a": [6, 2, 8]}, dict.fromkeys(TIES, 6.0))}
    assert parted([[one]], [[twice]]).near == 3


def recording(choices: list[Step], losses: list[float], gradient: float = 1.0, **more: Any) -> Recording:
    record = Record(0, 0, losses=losses, norms=[1.0] * len(losses), choices=choices)
    return Recording([record], {"w": torch.full((4,), gradient)}, {"w": ""}, Layout(), **more)


def judged(choices: tuple[list[Step], list[Step]], losses: list[float], gradient: float) -> Verdict:
    one, other = recording(choices[0], [3.0] * len(losses)), recording(choices[1], losses, gradient)
    return compare(one, other, Followed())


def steps(*by: float | None) -> tuple[list[Step], list[Step]]:
    """Of each step the choices of both sides, which part where a number is given."""
    pairs = [moved(0.2 if one is None else one) for one in by]
    same = [one is None for one in by]
    return (
        [told(["a"], right) for right, _ in pairs],
        [told(["a"], right if equal else left) for (right, left), equal in zip(pairs, same, strict=True)],
    )


def names(verdict: Verdict) -> set[str]:
    return {check.name for check in verdict.checks}


def test_equal_choices_are_compared_as_everything_is() -> None:
    assert judged(steps(None, None), [3.0, 3.0], 1.0).agree
    verdict = judged(steps(None, None), [3.0, 3.0], 1.5)
    assert verdict.failed == {"gradients"}
    assert not verdict.undecided
    assert verdict.as_json()["parting"] is None


def test_a_tie_at_the_first_step_leaves_numbers_open() -> None:
    verdict = judged(steps(1e-7, None), [3.1, 3.1], 1.5)
    assert verdict.undecided
    assert not verdict.agree
    assert not names(verdict) & {"loss", "grad_norm", "gradients"}
    assert not verdict.offenders
    assert "3 choices of best of layers.0.router fell otherwise: ties" in verdict.advice[0]
    assert verdict.advice[0].endswith("try another run.seed.")
    assert verdict.as_json()["undecided"] is True
    assert verdict.as_json()["parting"]["tie"] is True


def test_a_later_tie_leaves_later_numbers_open() -> None:
    open_later = judged(steps(None, 1e-7), [3.0, 3.1], 1.0)
    assert open_later.undecided
    assert {"loss", "grad_norm", "gradients"} <= names(open_later)
    assert open_later.advice[0].endswith("try another run.seed or --steps 1.")
    assert judged(steps(None, 1e-7), [3.1, 3.1], 1.0).failed == {"loss"}, "the first step is compared"
    assert judged(steps(None, 1e-7), [3.0, 3.1], 1.5).failed == {"gradients"}


def test_other_choices_without_ties_are_an_error_by_name() -> None:
    verdict = judged(steps(1e-2, None), [3.1, 3.1], 1.5)
    assert verdict.failed == {"routing", "loss", "gradients"}
    (sentence,) = verdict.advice
    assert "3 choices of best of layers.0.router fell otherwise, and at most 0 of them" in sentence
    assert judged(steps(1e-2), [3.0], 1.0).failed == {"routing"}


def test_wrong_gradients_come_before_what_a_later_step_chooses() -> None:
    verdict = judged(steps(None, 1e-2), [3.0, 3.1], 2.0)
    assert verdict.failed == {"routing", "loss", "gradients"}
    assert "2 times what it should be" in verdict.advice[0]
    assert not any("choices" in sentence for sentence in verdict.advice)


def test_a_tie_that_changes_nothing_agrees() -> None:
    verdict = judged(steps(1e-7), [3.0], 1.0)
    assert verdict.agree
    assert "routing" in names(verdict)


def test_other_data_is_told_before_other_choices() -> None:
    one, other = recording(steps(1e-7)[0], [3.0]), recording(steps(1e-7)[1], [3.1])
    one.first.batches, other.first.batches = [["a"]], [["b"]]
    verdict = compare(one, other, Followed())
    assert {"data", "loss"} <= verdict.failed
    assert verdict.routing_difference is None


def test_narrow_precisions_have_wider_ties() -> None:
    ours, theirs = steps(1e-3)
    one, other = (recording(side, [loss], tie=tie_of("bf16")) for side, loss in ((ours, 3.0), (theirs, 3.5)))
    verdict = compare(one, other, Followed(), exact=Exact(recording(ours, [3.0]), Record(0, 0)))
    assert verdict.undecided
    assert verdict.advice[0].endswith("try another run.seed or train.precision=fp32.")
    wide = compare(recording(ours, [3.0]), recording(theirs, [3.5]), Followed())
    assert {"routing", "loss"} <= wide.failed


def test_another_setting_is_excused_by_ties_too() -> None:
    ours, theirs = steps(1e-3)
    verdict = compare_settings(recording(ours, [3.0]), recording(theirs, [3.5], tie=tie_of("bf16")), "precision=bf16")
    assert verdict.undecided
    assert names(verdict) == {"initial weights", "data"}
    far = compare_settings(recording(ours, [3.0]), recording(theirs, [3.5]), "adamw.lr=1")
    assert far.failed == {"loss"}


# -- what a gradient's pattern suggests -----------------------------------------------------------


def advice(**gradients: tuple[float, float]) -> tuple[str, ...]:
    """Of parameters whose gradient along two axes is this, instead of (1, 0)."""
    one = recording([], [3.0])
    one.gradients = {name: torch.tensor([1.0, 0.0]) for name in ("up", "down", "gate")}
    other = recording([], [3.0])
    other.gradients = {name: torch.tensor(gradients.get(name, (1.0, 0.0))) for name in one.gradients}
    one.parameters = other.parameters = dict.fromkeys(one.gradients, "")
    return compare(one, other, Followed()).advice


def test_once_is_no_averaging_factor() -> None:
    (sentence,) = advice(up=(2.0, 0.0), down=(1.0, 5e-4))
    assert "gradients of up are 2 times" in sentence
    (sentence,) = advice(down=(1.0, 5e-4))
    assert "times" not in sentence
    assert "gradients of down differ by 5e-04, as rounding does" in sentence
