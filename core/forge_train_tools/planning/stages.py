"""One rank of each pipeline stage, looked at: composed on the meta device, and rehearsed where it differs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from forge_train.base.errors import ForgeError
from forge_train.compose.compose import Composition, compose
from forge_train.contract.batch import Batch
from forge_train.mesh.layout import Layout
from forge_train.mesh.tensors import held_bytes
from forge_train.mesh.world import World
from forge_train.plugin.job import Job
from forge_train.registry.setup import Setup
from forge_train.run.run import Run
from forge_train_kit.modalities import flops_of_items
from forge_train_kit.pipeline.timetable import Timetable

from . import alike
from .alike import Units, form_of
from .communication import Names
from .examples import RowItems, example_of
from .fewer import affordable
from .imagined import imagined
from .optimizer import ParameterSet, parameter_sets
from .parameters import Giant, Parameters, count, giants
from .passes import Footprint, footprint
from .record import COUNTED, END, Recorded, Rehearsed, counted
from .rehearsal import imagine_optimizer, rehearse
from .traffic import Traffic, expected_bytes, traffic


@dataclass
class Look:
    """Results for one rank, the first of its stage."""

    report: list[dict[str, Any]]
    idle: tuple[str, ...]
    parameters: Parameters
    whole: list[Giant]
    held: int
    """Bytes of parameters, frozen ones too."""
    flops: list[float | None]
    """Of each of its parts, per token, with what the items of its row cost."""
    expected_bytes: dict[str, float]
    items: Mapping[str, RowItems] = field(default_factory=dict)
    form: Hashable = None
    """Equal for stages that do the same; None for one that is rehearsed whatever others do."""
    sets: tuple[ParameterSet, ...] = ()
    rehearsed: Rehearsed = field(default_factory=lambda: Rehearsed(0, None, 0))
    unordered: Rehearsed | None = None
    """Of a pipeline: with the passes in the order of the rehearsal."""
    traffic: list[Traffic] = field(default_factory=list)
    pipeline: Passing | None = None

    def is_like(self, other: Look) -> bool:
        """Return True if both do the same: their parts have the same form, and their parameters are updated alike."""
        return self.form is not None and (self.form, self.sets) == (other.form, other.sets)

    @property
    def kernel_flops(self) -> float:
        """Of a step."""
        return sum(kernel.flops * times for kernel, times in self.rehearsed.kernels.items())

    @property
    def border(self) -> float:
        """Bytes of one message to a neighbour in the pipeline."""
        return max((one.bytes / one.count for one in self.traffic if one.kind == "send"), default=0.0)


@dataclass(frozen=True)
class Passing:
    """Rehearsal of a rank of a pipeline."""

    timetable: Timetable
    """Of the step."""
    alternatives: Mapping[str, Timetable | str]
    followed: Timetable
    """Of the rehearsal."""
    stage: int
    """That was rehearsed."""
    everything: Footprint
    activations: Footprint

    def growth(self, stage: int) -> tuple[int, int]:
        """By how many bytes the peaks of everything and of activations are above the rehearsal's on a stage that is
        like the rehearsed one."""
        number = dict(zip(self.timetable.parts_of(self.stage), self.timetable.parts_of(stage), strict=True))
        everything, activations = (
            one.renumbered(number).peak(self.timetable, stage) - one.peak(self.followed, self.stage)
            for one in (self.everything, self.activations)
        )
        return everything, activations

    def keeps(self) -> list[int]:
        """Return the bytes that each part of such a stage keeps for a micro-batch."""
        return [self.activations.keeps(part) for part in self.timetable.parts_of(self.stage)]


def look_at_stages(setup: Setup, layout: Layout, world: World, folder: Path, *, alternatives: bool) -> list[Look]:
    """Look at the first rank of every stage. One that is like another before it is not rehearsed again: only the order
    of its passes differs, and the timetable tells that.

    Raises:
        ConfigError: for a composition that can't be.
    """
    ranks = range(0, world.size, world.size // layout.pp)
    places = [replace(world, rank=rank, local_rank=rank % world.local_size) for rank in ranks]
    units = Units()
    first: list[Look] = []
    given: list[list[Any]] = []
    for stage, place in enumerate(places if layout.pp > 1 else ()):
        with imagined(layout, place) as context:
            first.append(_first_look(Job.of(setup.config, setup.hooks, Run(folder), context), stage, units))
            given.append(context.given)
    looks: list[Look] = []
    for stage, place in enumerate(places):
        if first and (twin := _twin(first[stage], zip(first, looks, strict=False))):
            looks.append(_like(twin, first[stage], stage))
            continue
        with imagined(layout, place, given) as context:
            job = Job.of(setup.config, setup.hooks, Run(folder), context)
            looks.append(_look(job, stage, units, alternatives=alternatives))
    return looks


def _first_look(job: Job, stage: int, units: Units) -> Look:
    """Compose a stage without knowing the others, and have it say what they will want to know of it."""
    composition = compose(job, allocate=False, change=units.look)
    look = _composed(job, composition, stage, units)
    try:
        look.sets = parameter_sets(imagine_optimizer(job, composition.model).param_groups)
    except ForgeError:  # it needs the others
        look.form = None
    return look


def _twin(own: Look, before: Iterable[tuple[Look, Look]]) -> Look | None:
    """A stage that was rehearsed and does what this one does, if there is one.

    Args:
        own: the first look at this stage.
        before: the first and the second look at each stage before it. Where they are not alike, something depends on
            what other stages said.
    """
    return next((two for one, two in before if own.is_like(one) and one.is_like(two) and two.pipeline), None)


def _like(twin: Look, own: Look, stage: int) -> Look:
    """Derive a stage's results from the rehearsal of one that does the same."""
    assert twin.pipeline is not None
    rehearsed = _in_order(twin.unordered or twin.rehearsed, twin.pipeline.growth(stage))
    return replace(own, rehearsed=rehearsed, traffic=twin.traffic, pipeline=twin.pipeline, unordered=twin.unordered)


def _composed(job: Job, composition: Composition, stage: int, units: Units) -> Look:
    """Look at a composition before it is rehearsed."""
    model, names, train = composition.model, Names(job.dist), job.config.train
    stages, example = job.dist.layout.pp, example_of(job)
    stored = {id(p): p for one in (model, *job.models.values()) for p in one.parameters()}  # frozen ones, too
    look = Look(
        report=composition.report,
        idle=composition.idle,
        parameters=count(model, names),
        whole=giants(model),
        held=held_bytes(stored.values()),
        flops=[_flops(part, example.batch) for part in model.parts],
        expected_bytes=expected_bytes(composition, names),
        items=example.items,
    )
    if stages > 1 and not affordable(model, job.dist.layout.micro_batches(train.global_batch, train.micro_batch)):
        look.form = (stage == 0, stage == stages - 1, *(form_of(part, units) for part in model.parts))
    return look


def _look(job: Job, stage: int, units: Units, *, alternatives: bool) -> Look:
    composition = compose(job, allocate=False, change=units.look)
    model, names = composition.model, Names(job.dist)
    look = _composed(job, composition, stage, units)
    laid_out = None if job.dist.layout.pp > 1 else alike.rehearse_alike(job, composition, units)
    recorded = laid_out or rehearse(job, model)
    look.sets = parameter_sets(imagine_optimizer(job, model).param_groups) if laid_out else recorded.sets
    look.rehearsed = counted(recorded)
    look.traffic = traffic(look.rehearsed, names)
    if recorded.executor is not None and recorded.followed is not None and not recorded.failed:
        table = recorded.executor.timetable(recorded.accumulation)
        look.pipeline = Passing(
            table,
            recorded.executor.alternatives(recorded.accumulation) if alternatives else {},
            recorded.followed,
            stage,
            *(
                footprint(_changes(recorded, activations=only), recorded.passes, table.parts_of(stage))
                for only in (False, True)
            ),
        )
        look.unordered = look.rehearsed
        look.rehearsed = _in_order(look.rehearsed, look.pipeline.growth(stage))
    return look


def _flops(part: Any, batch: Batch) -> float | None:
    count = getattr(part, "flops_per_token", None)
    if count is None:
        return None
    return float(count(batch.inputs.shape[1])) + flops_of_items(part, batch.extras) / batch.inputs.numel()


def _changes(recorded: Recorded, *, activations: bool) -> list[int]:
    """The changes of memory until the backward passes have ended, in bytes; 0 for those that do not count."""
    end = recorded.changes.index(END)
    return [
        int(one.numbers[0]) if not activations or "activations" in COUNTED[one.kind] else 0
        for one in recorded.changes[:end]
    ]


def _in_order(rehearsed: Rehearsed, growth: tuple[int, int]) -> Rehearsed:
    """A rehearsal whose passes come in an order that takes so many bytes more at the peak, of everything and of
    activations."""
    if rehearsed.peak is None or rehearsed.activations is None:
        return rehearsed
    everything, activations = growth
    return replace(
        rehearsed,
        activations=rehearsed.activations + activations,
        backward_peak=rehearsed.backward_peak + everything,
        peak=max(rehearsed.backward_peak + everything, rehearsed.update_peak),
    )
