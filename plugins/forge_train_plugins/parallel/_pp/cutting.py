"""A model cut into the parts of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from forge_train import Applied, ConfigError, Job
from forge_train.base.format import format_list
from forge_train_kit.pipeline import Timetable, Work
from forge_train_kit.pipeline.cuts import Cost, balanced, given
from forge_train_kit.pipeline.parts import Stages, cost_of, part_of

from .rules import advice
from .schedules import CountError, timetable
from .ties import Tie, Ties

if TYPE_CHECKING:
    from ..pp import PipelineParallel


@dataclass(frozen=True)
class Cut:
    """Parts of a cut model that this rank holds."""

    applied: Applied
    parts: tuple[int, ...]
    """Numbers of this rank's parts, in the order of the model."""
    placement: tuple[int, ...]
    """Part → its rank."""
    ties: Ties
    costs: tuple[Cost, ...]
    """Of every part of the model."""


def cut(model: nn.Module, config: PipelineParallel.Config, job: Job) -> Cut:
    """Cut a model, and keep this rank's parts.

    Raises:
        ConfigError: for a model that can't be cut like that.
    """
    stages = _stages(model)
    train, ranks = job.config.train, job.dist.layout.pp
    tables = [_timetable(config, job, batch) for batch in train.batches]
    table = max(tables, key=lambda table: table.micro_batches)
    if any(one.placement != table.placement for one in tables):
        raise ConfigError(f"pp.schedule: {config.schedule} places parts otherwise when the batch grows.")
    entries = [cost_of(part_of(model, stages, range(at, at + 1)), train.sequence) for at in range(len(stages))]
    cuts = given(config.cuts, stages) if config.cuts else balanced(entries, table.parts)
    if len(cuts) - 1 != table.parts:
        raise ConfigError(
            f"pp.cuts: {len(cuts) - 2} cuts make {len(cuts) - 1} parts, and {config.schedule} has {table.parts} on "
            f"{ranks} ranks."
        )
    runs = [range(start, stop) for start, stop in pairwise(cuts)]
    ties, copies = _untie(model, stages, runs)
    mine = tuple(table.parts_of(job.dist.mesh("dense", "pp").get_local_rank()))
    parts = [part_of(model, stages, runs[number]) for number in mine]
    splits = _splits(table)
    for part in parts:
        part.split_backward = splits  # type: ignore[assignment]  # declared for SHARD transforms
    costs = tuple(
        Cost(sum(c.flops for c in entries[a:b]), sum(c.bytes for c in entries[a:b])) for a, b in pairwise(cuts)
    )
    between = Ties(job, ties, dict(zip(mine, parts, strict=True)), table.placement)
    applied = Applied(
        list(parts),
        tuple(name for number in mine for at in runs[number] for name in stages[at]),
        _note(config.schedule, stages, runs, costs, table),
        copies=tuple(copies),
        expected_bytes=_expected_bytes(model, table, mine, job),
        after_backward=between.sum_gradients,
        free_gathered=between.forget,
    )
    return Cut(applied, mine, table.placement, between, costs)


def _timetable(config: PipelineParallel.Config, job: Job, batch: int) -> Timetable:
    """Of steps with so many sequences."""
    train, layout = job.config.train, job.dist.layout
    count = layout.micro_batches(batch, train.micro_batch)
    try:
        return timetable(config, layout.pp, count)
    except CountError as error:
        where = "train.global_batch" if batch == train.global_batch else "a batch of train.batch_warmup"
        split = (
            f"{batch} sequences ({where}) in micro-batches of {train.micro_batch} on {layout.dp} data-parallel ranks"
        )
        way_out = advice(config, layout.pp, batch // layout.dp, count)
        raise ConfigError(f"{error} They are {split}{way_out and ': '}{way_out}.") from error


def _stages(model: nn.Module) -> Stages:
    try:
        stages: Stages = getattr(model, "stages", ())
    except TypeError as error:  # a model's word for why it can't be cut
        raise ConfigError(f"parallel.pp: {error}; set parallel.pp = 1.") from error
    name = type(model).__name__
    if not stages or not callable(getattr(model, "hidden_shape", None)):
        lacks = "no stages" if not stages else "no hidden_shape(batch, sequence)"
        raise ConfigError(f"parallel.pp: the model ({name}) declares {lacks}, so it can't be cut; set parallel.pp = 1.")
    inside = tuple(f"{module}." for entry in stages for module in entry)
    if loose := [one for one, _ in model.named_parameters(remove_duplicate=False) if not one.startswith(inside)]:
        raise ConfigError(
            f"parallel.pp: no stage of {name} has {format_list(loose)}; each parameter must belong to one, or every "
            "part would train its own."
        )
    return stages


def _untie(model: nn.Module, stages: Stages, runs: Sequence[range]) -> tuple[list[Tie], list[str]]:
    """Give tied parameters that come into another part than their first name a tensor of their own: one for each part,
    with a tie by the first name that it has there, and the names of all.

    Their modules declare `tied_names`: attribute → the names of the parameter in all parts."""
    homes = {name: part for part, run in enumerate(runs) for at in run for name in stages[at]}

    def home(parameter: str) -> int:
        return next(part for name, part in homes.items() if parameter.startswith(f"{name}."))

    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    ties: list[Tie] = []
    copies: list[str] = []
    for first, *others in names.values():
        apart: dict[int, nn.Parameter] = {}
        for name in others:
            if (part := home(name)) == home(first):
                continue
            owner, _, attribute = name.rpartition(".")
            module = model.get_submodule(owner)
            old = getattr(module, attribute)
            if part not in apart:
                apart[part] = nn.Parameter(torch.empty_like(old), requires_grad=old.requires_grad)
                ties.append(Tie(name, part, first, home(first)))
            module._parameters[attribute] = apart[part]
            copies.append(name)
        for name in (first, *others) if apart else ():
            owner, _, attribute = name.rpartition(".")
            here: Any = model.get_submodule(owner)
            here.tied_names = {**getattr(here, "tied_names", {}), attribute: (first, *others)}
    return ties, copies


def _splits(table: Timetable) -> bool:
    return any(one.work is Work.WEIGHT_GRADIENT for rank in range(len(table.ranks)) for one in table.actions(rank))


def _note(schedule: str, stages: Stages, runs: Sequence[range], costs: Sequence[Cost], table: Timetable) -> str:
    total = sum(cost.flops for cost in costs)
    shares = [cost.flops / total if total else cost.bytes / sum(c.bytes for c in costs) for cost in costs]
    of_ranks = [sum(shares[part] for part in table.parts_of(rank)) for rank in range(len(table.ranks))]
    what = "FLOPs" if total else "bytes"
    begins = ", ".join(stages[run.start][0] for run in runs[1:])
    ranks = " + ".join(f"{share:.0%}" for share in of_ranks)
    apart = "; weights stay gathered through the step: input and weight gradients are apart" if _splits(table) else ""
    return f"{schedule}, {table.parts} parts (cut before {begins}), {ranks} of the {what} by rank{apart}"


def _expected_bytes(model: Any, table: Timetable, mine: Sequence[int], job: Job) -> dict[str, float]:
    """Hidden states forward and their gradients back, once for each micro-batch and each border between ranks. Where
    tensor parallelism splits them, only the ranks of tp know how much is left: nothing is said."""
    if job.dist.layout.tp > 1:
        return {}
    train, place = job.config.train, table.placement
    each = math.prod(model.hidden_shape(train.micro_batch, train.sequence // job.dist.layout.cp))
    borders = sum(
        place[part] != place[other] for part in mine for other in (part - 1, part + 1) if 0 <= other < table.parts
    )
    return {"pp": float(each * job.precision.compute.itemsize * table.micro_batches * borders)}
