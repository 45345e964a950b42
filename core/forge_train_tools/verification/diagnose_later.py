"""Diagnoses of wrong updates and evaluations whose gradients are known."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from forge_train.base.format import format_list
from forge_train_kit.ranks import named

from .follow import Followed
from .patterns import group, size_hint
from .ranks import side_effects
from .recording import Recording, SideEffect
from .updates import WEIGHT, Moved
from .verdict import Check, Offender, Verdict

NEAR = 1e-3
"""Multiples this near are the same multiple."""
NOTHING = 0.02
"""So little of something is nothing of it."""


def of_updates(verdict: Verdict, layout: Recording, followed: Followed) -> Iterator[str]:
    """Explain updates in which the optimizer differs on the same gradients."""
    wrong = [one for one in followed.updates if one in verdict.updates]
    if not wrong:
        return
    states, weights = ([one for one in wrong if (one.part == WEIGHT) is own] for own in (False, True))
    where = _ranks(wrong, layout)
    for key, (one, other) in list(followed.settings.items())[:3]:
        yield f"The optimizer's setting {key} is {one} on one process and {other} on the layout{where}."
    if lost := [one for one in states if math.isnan(one.ratio) and math.isinf(one.error)]:
        yield f"The optimizer's {format_list([str(one) for one in lost])} is missing, or of another shape."
    elif states:
        yield _states(states, followed, layout, where)
    else:
        yield _weights(weights, followed, layout, where)


def _ranks(wrong: Sequence[Moved], layout: Recording) -> str:
    """Name the ranks that are wrong, if others are right."""
    ranks = {rank for one in wrong for rank in one.ranks}
    if not ranks or any(not one.ranks for one in wrong):
        return ""
    return f", in what {named(ranks, layout.layout)} hold{'s' * (len(ranks) == 1)}"


def _states(wrong: Sequence[Moved], followed: Followed, layout: Recording, where: str) -> str:
    if followed.unclipped:
        return (
            "Without clipping one process comes to the layout's weights: the layout does not clip gradients to "
            "train.clip_norm, or clips what the optimizer is not given."
        )
    if followed.clipped_by_rank:
        return (
            "One process comes to the layout's weights if it clips what each rank holds by the norm of that alone: "
            "each rank clips by a norm of its own. Clip by the norm over all ranks (update.grad_norm)."
        )
    keys = {one.part for one in wrong}
    right = {one.part for one in followed.updates} - keys - {WEIGHT}
    factors = {key: _factor([one for one in wrong if one.part == key]) for key in keys}
    smallest = min((factor for factor in factors.values() if factor), key=lambda k: abs(math.log(k)), default=0.0)
    if smallest and all(_power(factor, smallest) for factor in factors.values()):
        return (
            f"The optimizer's state is that of gradients {smallest:.3g} times as large{where}: they are changed after "
            f"their global norm was taken, between clipping and the optimizer's step.{size_hint(smallest, layout)}"
        )
    if moving := [key for key in sorted(right) if key != "step"]:
        return (
            f"The optimizer's {format_list(sorted(keys))} differs and {format_list(moving)} agrees{where}, from the "
            f"same gradients: a setting that only {format_list(sorted(keys))} depends on, such as its decay (betas), "
            "is another."
        )
    names = sorted({one.name for one in wrong})
    return (
        f"The optimizer's {format_list(sorted(keys))} of {group(names, layout.parameters)} is not what these gradients "
        f"give{where}: they are changed between their global norm and the optimizer's step, its settings differ, or it "
        "takes shards for whole tensors."
    )


def _weights(wrong: Sequence[Moved], followed: Followed, layout: Recording, where: str) -> str:
    names = [one.name for one in wrong]
    which = group(names, layout.parameters)
    state = "gradients and the optimizer's state agree"
    if factor := _factor(wrong):
        return (
            f"The weights move {factor:.5g} times as far as they should ({which}){where}, though {state}: the learning "
            f"rate is {factor:.5g} times what it should be, or the step is scaled.{size_hint(factor, layout)}"
        )
    if all(one.along for one in wrong):
        along = sum(one.along for one in wrong) / len(wrong)
        share = 1 - along / followed.decay if followed.decay else math.inf
        said = "missing" if abs(share) < NOTHING else f"{share:.3g} times what it should be"
        said = said if math.isfinite(share) else "not 0, as it should be,"
        return f"Weight decay is {said} for {which}{where}: they differ by a multiple of themselves, though {state}."
    return (
        f"Weights move otherwise ({which}){where}, though {state}: the optimizer takes shards for whole tensors, or a "
        "plugin changes weights beside it, in on_step perhaps."
    )


def _factor(wrong: Sequence[Offender]) -> float:
    """The multiple that all are of what they should be; 0 if they are not."""
    ratios = [one.ratio for one in wrong]
    if not all(isinstance(one, Moved) and one.pure and one.ratio > 0 for one in wrong):
        return 0.0
    mean = sum(ratios) / len(ratios)
    return mean if all(abs(ratio - mean) < NEAR * mean for ratio in ratios) and abs(mean - 1) > NEAR else 0.0


def _power(factor: float, base: float) -> bool:
    """Return True if a factor is a base or its square, as in running means of gradients and of their squares."""
    return any(abs(factor - base**power) < 5 * NEAR * factor for power in (1, 2))


def of_side_effects(layout: Recording) -> Iterator[str]:
    """Name the code that changes the model or the optimizer while evaluating or saving."""
    kinds: dict[SideEffect, str] = {"evaluation": "Evaluating", "checkpoint": "Saving"}
    for kind, what in kinds.items():
        for who, names in side_effects(layout.ranks, kind).items():
            yield (
                f"{who or what} changes {format_list(names)}: evaluating and saving must leave weights, buffers and "
                "the optimizer's state as they are."
            )


def of_evaluation(check: Check, layout: Recording, followed: Followed) -> str:
    """Why a held-out loss may differ from the same weights."""
    ours, theirs = followed.record, layout.first
    if abs(theirs.evaluation[0] - theirs.evaluation[1]) > check.tolerance * abs(theirs.evaluation[0]):
        return (
            f"The same evaluation done twice gives {theirs.evaluation[0]:.7g} and {theirs.evaluation[1]:.7g}: it draws "
            "random numbers, as in training mode, or goes on in the data instead of starting anew."
        )
    seen = [row for rank in {rank.data_rank: rank for rank in layout.ranks}.values() for row in rank.evaluated]
    if sorted(seen) != sorted(ours.evaluated):
        return "The layout evaluates other sequences: validation data too must be placed by job.dist.data_rank."
    training = followed.training_loss
    if training is not None and abs(training - theirs.evaluation[0]) <= 10 * check.tolerance * abs(training):
        return (
            f"The layout evaluates in training mode: its held-out loss {theirs.evaluation[0]:.7g} is what one process "
            f"gives in training mode, and {ours.evaluation[0]:.7g} in evaluation mode."
        )
    return (
        f"The held-out losses differ ({check.where}) from the same weights: the forward pass without gradients "
        "computes something else, or the mean is not over the unmasked tokens of all ranks."
    )
