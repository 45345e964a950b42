"""Diagnoses from the pattern of differences between one process and a layout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from forge_train.base.format import format_list
from forge_train_kit.ranks import named

from .diagnose_later import of_evaluation, of_side_effects, of_updates
from .follow import Followed
from .overflow import Overflow
from .patterns import axes_apart, group, of_gradients, size_hint
from .ranks import other_starts, side_effects
from .recording import Recording
from .routing import TIE, RoutingDifference
from .states import of_resume, of_states
from .verdict import Verdict

BEFORE = frozenset({"initial weights", "peers", "data"})
"""Checks without which no other says anything."""
CHANCE = frozenset({"loss", "grad_norm", "gradients", "later gradients", "metrics"})
"""Checks that fail where the forward pass is left to chance."""
FOUND = frozenset({"updates", "optimizer", "later gradients", "buffers", "replicas"})
"""Checks that say why the losses of later steps differ."""


def diagnose(verdict: Verdict, one: Recording, layout: Recording, followed: Followed, explained: str) -> Iterator[str]:
    """Sentences, what must be mended first coming first."""
    failed = {check.name: check for check in verdict.checks if not check.ok}
    if check := failed.get("initial weights"):
        yield _start(check.where, one, layout)
    if check := failed.get("peers"):
        yield (
            f"Ranks with the same data-parallel rank were fed different batches ({check.where}): `build_data` must "
            "place its micro-batches by job.dist.data_rank and job.dist.data_ranks, never by the rank."
        )
    elif check := failed.get("data"):
        yield (
            f"The layout trains on other sequences ({check.where}): a rank's n-th micro-batch must be number "
            "n × data ranks + data-parallel rank of the global stream, whatever the number of ranks."
        )
    if BEFORE & failed.keys():
        return
    yield from of_side_effects(layout)
    if of_chance(layout) and CHANCE & failed.keys():
        yield of_chance(layout)
        return
    yield from of_vetoes(layout, followed)
    if overflow := Overflow.find(one, layout, followed):
        yield str(overflow)
    parted = verdict.routing_difference
    moved = {"buffers", "updates", "optimizer"} & failed.keys()  # from which later choices follow
    if parted and (parted.tie or parted.step == 1 or not (verdict.offenders or moved)):
        yield of_choices(parted)
    if "routing" not in failed or (parted and parted.step > 1):
        yield from of_slices(verdict, layout)
        yield from [explained] if explained else of_gradients(verdict.offenders, layout)
        yield from _loss(verdict, failed, one, layout, followed)
        if check := failed.get("buffers"):
            axes = axes_apart([check.where], layout, "weights")
            where = f", and differs between ranks along {' and '.join(axes)}" if axes else ""
            cause = "each rank moves it by its own tokens. What moves it" if axes else "what moves it"
            yield (
                f"A persistent buffer ends otherwise ({check.where}){where}: {cause} must be counted once, over the "
                "tokens of all ranks."
            )
    if (check := failed.get("checkpoint")) and not side_effects(layout.ranks, "checkpoint"):
        yield (
            f"One process does not load what the layout saved ({check.where}): a parameter that is sharded must be a "
            "DTensor, under its global name, and so must its optimizer state."
        )
    else:
        yield from of_updates(verdict, layout, followed)
    yield from of_states(verdict, followed)
    if verdict.later and not verdict.offenders:
        yield from of_gradients(verdict.later, layout, later=True)
    yield from of_resume(verdict, layout, followed)
    if (check := failed.get("metrics")) and not {"loss", "grad_norm", "gradients", "routing"} & failed.keys():
        yield (
            f"A plugin's metric is not that of one process ({check.where}), though loss and gradients are. "
            "Core adds metrics up over ranks, and counts ranks with the same data once: observe what this rank sees, "
            "not yet summed over ranks, and set per_rank = True for what each rank has for itself, such as shards."
        )
    if (check := failed.get("evaluation")) and not side_effects(layout.ranks, "evaluation"):
        yield of_evaluation(check, layout, followed)


def of_chance(layout: Recording) -> str:
    """Explain a model that draws random numbers; empty for one that draws none."""
    if not any(rank.draws for rank in layout.ranks):
        return ""
    return (
        "The model draws random numbers in training, as dropout does, and every rank draws its own: no layout repeats "
        "one process. Verify it without them, or make them a function of the sample, as forge_train_kit.model.Dropout "
        "does."
    )


def of_slices(verdict: Verdict, layout: Recording) -> Iterator[str]:
    """Suggest causes of a wrong forward pass with cut sequences."""
    tolerance = next((check.tolerance for check in verdict.checks if check.name == "loss"), float("inf"))
    start, ours = verdict.losses[0]
    if layout.layout.cp == 1 or abs(start - ours) <= tolerance * abs(start):
        return
    merged = "at how a block's partial result is merged: rescaled by its log-sum-exp, and each block once"
    where = (
        "at documents that begin in one slice and go on in another (it is these if one document a row agrees), and "
        f"{merged}"
        if layout.first.documents
        else merged
    )
    yield (
        f"The forward pass is wrong, from equal weights and data, and sequences are cut over parallel.cp = "
        f"{layout.layout.cp}: attention does not see of other ranks' slices what it should. Look {where}."
    )


def of_vetoes(layout: Recording, followed: Followed) -> Iterator[str]:
    """Steps that one side leaves out, or some ranks; those whose norm is not finite are left out for that."""
    ours = followed.record.vetoes
    for step in sorted({step for rank in layout.ranks for step in rank.vetoes} | ours.keys(), key=int):
        ranks = [rank for rank in layout.ranks if step in rank.vetoes]
        if not math.isfinite(layout.first.norms[int(step) - 1]) or (step in ours and len(ranks) == len(layout.ranks)):
            continue
        sides = ["one process"] * (step in ours)
        sides += [f"{named([rank.rank], layout.layout)} of the layout" for rank in ranks]
        reason = ranks[0].vetoes[step] if ranks else ours[step]
        yield (
            f"A plugin vetoes step {step} in on_gradients on {format_list(sides)} alone ({reason!r}): there the "
            "weights stay as they were. What it decides must be the same on all ranks, and on one process."
        )


def of_no_update(layout: Recording) -> str:
    """Explain a run without any update; empty if there was one."""
    vetoes = layout.first.vetoes
    if not vetoes or len(vetoes) < len(layout.first.losses):
        return ""
    reasons = format_list(dict.fromkeys(vetoes.values()))
    return f"Every step was vetoed ({reasons}), so no update was compared: try more --steps."


def _start(where: str, one: Recording, layout: Recording) -> str:
    ranks = {rank for apart in other_starts(one, layout).values() for rank in apart}
    if 0 < len(ranks) < len(layout.ranks):
        return (
            f"The initial weights differ on {named(ranks, layout.layout)} only ({where}): a plugin changes them there "
            "before the first step, in on_start perhaps. What it does must not depend on the rank."
        )
    return (
        f"The initial weights differ ({where}): a parameter must be declared by `initial(name)` of the module that "
        "owns it, and be filled by core, so that it starts the same on every topology."
    )


def of_choices(parted: RoutingDifference) -> str:
    """Explain routing choices that differ."""
    found = f"At step {parted.step}, {parted.moved} choices of {parted.where} fell otherwise"
    equal = f"between scores that are equal up to rounding ({parted.slack:.0e} relative)"
    if not parted.tie:
        said = f"{found}, and at most {parted.near} of them are {equal}"
        if parted.among == "tokens" and parted.step == 1:
            return (
                f"{said}. All choices before it agree, so that what it chooses from is right: the limit is another, or "
                "each rank chooses among its own tokens instead of all tokens of the micro-batch."
            )
        return (
            f"{said}: the scores are computed otherwise, or what is made of them. What comes after it differs for that "
            "alone."
        )
    ways = ["another run.seed"]
    if parted.step > 1:
        ways.append(f"--steps {parted.step - 1}")
    if parted.allowed > TIE:
        ways.append("train.precision=fp32")
    return (
        f"{found}: ties. Both sides have at least as many {equal}. Loss, gradient norm"
        f"{', gradients' * (parted.step == 1)} and buffers are not compared from that step on: they differ although "
        f"nothing is wrong. To compare more, try {' or '.join(ways)}."
    )


def _loss(
    verdict: Verdict, failed: Mapping[str, object], one: Recording, layout: Recording, followed: Followed
) -> Iterator[str]:
    tolerance = next((check.tolerance for check in verdict.checks if check.name == "loss"), float("inf"))
    start, ours = verdict.losses[0]
    if abs(start - ours) > tolerance * abs(start):
        hint = size_hint(ours / start, layout) if start else ""
        yield (
            f"The loss differs from the first step on ({start:.7g} and {ours:.7g}) from equal weights and data: the "
            f"forward pass computes something else, or the mean is not over the unmasked tokens of all ranks.{hint}"
        )
        return
    if verdict.offenders:
        return
    taken = [step.norm for step in followed.steps]
    told = zip(followed.record.norms, layout.first.norms, strict=False)
    wrong, changed = (next((n for n in norms if abs(n[0] - n[1]) > 1e-4 * n[0]), None) for norms in (taken, told))
    if "grad_norm" in failed and wrong:
        yield (
            f"The gradients' global norm is not theirs ({wrong[0]:.7g} and {wrong[1]:.7g}): a sharded parameter counts "
            "once over its mesh, a replicated one once in all. Clipping scales by it."
        )
    elif "grad_norm" in failed and changed:
        yield (
            f"A plugin changes the gradients' global norm in on_gradients, to {changed[0]:.7g} on one process and to "
            f"{changed[1]:.7g} on the layout, from the same gradients. What it does must not depend on the ranks."
        )
    elif "loss" in failed and not FOUND & failed.keys():
        yield (
            "The losses of later steps differ, though the first step, later gradients and the optimizer agree: "
            "something other than the weights changes from step to step."
        )
    apart = [name for name in layout.first.weights if axes_apart([name], layout, "weights")]
    if "replicas" in failed and ("buffers" not in failed or any(name in layout.parameters for name in apart)):
        axes = axes_apart(apart, layout, "weights")
        yield (
            f"{group(apart, layout.parameters) if apart else 'Loss or norm'} differ between ranks that hold replicas"
            f"{' along ' + ' and '.join(axes) if axes else ''}: their gradients, or what the optimizer does with them, "
            "are not the same on all of them."
        )
