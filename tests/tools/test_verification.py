"""What `forge verify` is made of: a schedule's peak, updates compared, and wrong gradients taken apart."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR

from forge_train.mesh.layout import Layout
from forge_train_tools.verification import Offender
from forge_train_tools.verification.explain import Explanation, _fit, of_unreduced
from forge_train_tools.verification.follow import Followed, FollowedStep
from forge_train_tools.verification.later import later_checks, path_checks
from forge_train_tools.verification.overflow import Overflow
from forge_train_tools.verification.peak import PATIENCE, to_peak
from forge_train_tools.verification.recording import Record, Recording
from forge_train_tools.verification.routing import TIES, RoutingCounts
from forge_train_tools.verification.updates import UPDATE, WEIGHT, moves, settings

pytestmark = [pytest.mark.unit]


def optimizer(lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=lr)


def sequential(of: torch.optim.Optimizer) -> SequentialLR:
    return SequentialLR(of, [LinearLR(of, 0.1, total_iters=20), CosineAnnealingLR(of, 30)], milestones=[20])


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(
    ("make", "steps", "peak", "rate"),
    [
        (lambda of: LambdaLR(of, lambda step: 1.0), 10_000, 0, 1.0),
        (lambda of: LambdaLR(of, lambda step: 1 / (step + 1)), 100, 0, 1.0),
        (lambda of: LambdaLR(of, lambda step: min(step, 3 * PATIENCE) / 10), 10_000, 3 * PATIENCE, 300.0),
        (lambda of: LambdaLR(of, lambda step: float(step > 2 * PATIENCE)), 10_000, 2 * PATIENCE + 1, 1.0),
        (lambda of: LambdaLR(of, lambda step: step / 10), 50, 49, 4.9),
        (sequential, 50, 20, 1.0),
    ],
)
def test_a_schedule_is_put_to_its_peak(make: Any, steps: int, peak: int, rate: float) -> None:
    of = optimizer()
    schedule = make(of)
    assert to_peak(schedule, of, steps) == peak
    assert of.param_groups[0]["lr"] == pytest.approx(rate)
    other = optimizer()
    straight = make(other)
    for _ in range(peak):
        straight.step()
    for _ in range(5):
        assert of.param_groups[0]["lr"] == other.param_groups[0]["lr"], (
            "it goes on as if it had come there step by step"
        )
        schedule.step()
        straight.step()


# -- updates ----------------------------------------------------------------------------------------------------------


def state(weight: Tensor, **parts: Tensor) -> dict[str, Tensor]:
    return {"model.w": weight, "model.w.bias": weight, **{f"optimizer.state.w.{k}": v for k, v in parts.items()}}


def test_a_weight_is_judged_by_how_far_it_moved() -> None:
    start = {"w": torch.ones(64)}
    right, far = (torch.ones(64) + by * torch.linspace(-1, 1, 64) for by in (0.01, 0.0101))
    (found,) = moves(start, {"model.w": right}, {"model.w": far}, 5)
    assert found.error == pytest.approx(0.01, rel=0.05)
    assert found.ratio == pytest.approx(1.01, rel=1e-4)
    assert found.pure
    (same,) = moves(start, {"model.w": right}, {"model.w": right + 2**-23}, 5)
    assert same.error < UPDATE, "what storing a weight rounds is no difference"


def test_decay_is_a_multiple_of_the_weights_and_ranks_are_told_apart() -> None:
    start = {"w": torch.randn(64, 4, generator=torch.Generator().manual_seed(0))}
    right = start["w"] + 0.01
    left = right.clone()
    left[32:] += 0.001 * start["w"][32:]
    ranks = [Record(rank, rank, pieces={"w": [(32 * rank, 32 * rank + 32), (0, 4)]}) for rank in range(2)]
    (found,) = moves(start, {"model.w": right}, {"model.w": left}, 3, ranks)
    assert found.along == pytest.approx(0.001, rel=1e-2)
    assert found.ranks == (1,)
    (found,) = moves(start, {"model.w": right}, {"model.w": right + 0.001}, 3, ranks)
    assert (found.along, found.ranks) == (0.0, ())


def test_states_are_compared_by_key_and_buffers_are_not() -> None:
    start, ones = {"w": torch.ones(4)}, torch.ones(4)
    mine = state(ones, mean=ones, square=ones, step=torch.tensor(3.0))
    theirs = state(ones, mean=ones, square=2 * ones, step=torch.tensor(3.0))
    found = moves(start, mine, {**theirs, "model.w.bias": 3 * ones}, 2)
    assert [(one.part, one.ratio) for one in found if one.error > UPDATE] == [("square", 2.0)]
    assert {one.part for one in found} == {WEIGHT, "mean", "square", "step"}
    lost = moves(start, mine, {"model.w": ones}, 2)
    assert [one.error for one in lost][:3] == [math.inf] * 3


def test_settings_are_compared_by_parameter_whatever_its_group() -> None:
    one = {"param_groups": [{"params": ["a", "b"], "lr": 0.1, "betas": {"$tuple": [0.9, 0.95]}}]}
    other = {"param_groups": [{"params": [p], "lr": 0.1, "betas": {"$tuple": [0.9, 0.95]}} for p in "ab"]}
    assert settings(one, other) == {}
    other["param_groups"][1]["betas"] = {"$tuple": [0.9, 0.999]}
    assert settings(one, other) == {"betas": ((0.9, 0.95), (0.9, 0.999))}


# -- gradients in parts -----------------------------------------------------------------------------------------------


def test_gradients_are_taken_apart() -> None:
    chance = torch.Generator().manual_seed(0)
    first, second, attached = ({"w": torch.randn(50, generator=chance)} for _ in range(3))
    nothing = {"w": torch.zeros(50)}
    lost = {"w": first["w"].clone()}
    assert _fit([first, second, attached], lost) == pytest.approx([1, 0, 0], abs=1e-6)
    assert _fit([first, second, nothing], {"w": first["w"] + 2 * second["w"]}) == pytest.approx([1, 2, 0], abs=1e-6)
    assert _fit([first, second, nothing], attached) is None


def test_what_is_wrong_is_said_of_each_micro_batch() -> None:
    said = str(Explanation((1.0, 1.0, 1.0, 0.0), 0.0, 2))
    assert "are those of its 4 micro-batches, but micro-batch 2 of 2 of data rank 1 is missing: every" in said
    assert "micro-batch 1 of 2 counts 2 times" in str(Explanation((2.0, 1.0), 0.0, 1))
    assert "weigh 3 times what they should" in str(Explanation((1.0, 1.0), 2.0, 1))


def test_shards_that_nobody_reduced_are_told_from_others() -> None:
    chance = torch.Generator().manual_seed(0)
    parts = [{"w": torch.randn(4, 3, generator=chance), "v": torch.randn(5, generator=chance)} for _ in range(4)]
    ranks = [Record(rank, rank, pieces={"w": [(2 * rank, 2 * rank + 2), (0, 3)], "v": [(0, 5)]}) for rank in range(2)]
    first, second = (parts[rank]["w"] + parts[rank + 2]["w"] for rank in range(2))
    right = {"w": first + second, "v": sum(part["v"] for part in parts)}

    def said(**found: Tensor) -> str:
        return of_unreduced(parts, Recording(ranks, {**right, **found}, {"w": "", "v": ""}, Layout(dp_shard=2)))

    own = torch.cat([first[:2], second[2:]])
    assert "The gradients of w are not reduced over the data-parallel ranks" in said(w=2 * own)
    assert said(w=torch.cat([second[:2], first[2:]])) == ""
    assert said(w=torch.cat([first[:2], right["w"][2:]])) == ""
    assert said() == ""


def test_a_gradient_of_zeros_is_right() -> None:
    """Such as that of a parameter that no token of step 1 used."""
    parts = [{"w": torch.ones(4, 3), "v": torch.zeros(5)}, {"w": 2 * torch.ones(4, 3), "v": torch.zeros(5)}]
    ranks = [Record(rank, rank, pieces={"w": [(2 * rank, 2 * rank + 2), (0, 3)], "v": [(0, 5)]}) for rank in range(2)]
    own = torch.cat([parts[0]["w"][:2], parts[1]["w"][2:]])
    recording = Recording(ranks, {"w": own, "v": torch.zeros(5)}, {"w": "", "v": ""}, Layout(dp_shard=2))
    assert "The gradients of w are not reduced" in of_unreduced(parts, recording)


# -- low precision ----------------------------------------------------------------------------------------------------


def test_choices_in_an_evaluation_are_compared_in_low_precision_too() -> None:
    def record(taken: list[float]) -> Record:
        counts = RoutingCounts({"row": taken}, dict.fromkeys(TIES, 1.0))
        return Record(0, 0, evaluation=[1.0, 1.0], decided={"experts of router": counts})

    ours, theirs = record([2.0, 1.0, 3.0]), record([1.0, 2.0, 3.0])
    steps = [FollowedStep([], (1.0, 1.0)), FollowedStep([Offender("w", 1e-3, 1.0)], (1.0, 1.0), own=2e-2)]
    one, layout = (Recording([rank], {}, {}, tie=TIES[-1]) for rank in (ours, theirs))
    checks, _ = later_checks(one, layout, Followed(ours, steps), ours, TIES[-1])
    assert [(check.name, check.ok) for check in checks] == [("later gradients", True)], "an evaluation was no tie"


OVERFLOWS = {  # axes, steps that one process and the layout leave out, and on the layout's path: what is said
    ("tp", (2,), ()): "on one process alone, and the layout takes the step: tp and cp sum in parts",
    ("cp", (2,), ()): "on one process alone, and the layout takes the step: tp and cp sum in parts",
    ("ep", (), (2,)): "on the layout alone, and one process takes the step: ep sums at once an expert's tokens",
    ("tp", (), (2,)): "on the layout alone, and one process takes the step: the layout scales the loss otherwise",
    ("ep", (2,), ()): "on one process alone, and the layout takes the step: the layout scales the loss otherwise",
    ("dp_shard", (2,), ()): "on one process alone, and the layout takes the step: the layout scales the loss",
    ("dp_shard", (1, 2), (1, 2)): "",
}


@pytest.mark.parametrize("case", OVERFLOWS, ids=str)
def test_an_overflow_on_one_side_is_named_and_forgiven_as_promised(case: Any) -> None:
    axis, ours, theirs = case
    one, layout = (Recording([record], {}, {}, Layout(**{axis: 2})) for record in map(overflowing, (ours, theirs)))
    steps = [FollowedStep([], (1.0, 1.0), (step not in ours, step not in theirs)) for step in (1, 2, 3)]
    found = Overflow.find(one, layout, Followed(steps=steps))
    assert OVERFLOWS[case] in str(found or "")
    assert (found is None) == (ours == theirs)
    assert found is None or found.promised == ("scales the loss" not in OVERFLOWS[case])


def test_an_overflow_that_is_not_promised_on_the_layouts_path_is_not_forgiven() -> None:
    one, layout = (Recording([overflowing(steps)], {}, {}, Layout(tp=2)) for steps in ((2,), ()))
    steps = [FollowedStep([], (1.0, 1.0), finite) for finite in ((True, True), (False, True), (True, False))]
    found = Overflow.find(one, layout, Followed(steps=steps))
    assert found
    assert not found.promised


def test_steps_that_overflow_on_both_sides_have_equal_norms_on_the_layouts_path() -> None:
    record = overflowing((2,))
    followed = Followed(record, [FollowedStep([], (norm, norm)) for norm in record.norms])
    assert path_checks(Recording([record], {}, {}), followed, None)["grad_norm"].ok


def overflowing(steps: tuple[int, ...]) -> Record:
    """Three steps, of which some overflow."""
    norms = [math.inf if step in steps else 1.0 for step in (1, 2, 3)]
    return Record(0, 0, losses=[1.0] * 3, norms=norms, vetoes={str(step): "overflow" for step in steps})
