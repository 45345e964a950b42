"""Composition: the only place that applies transforms, in the mandated order; an inspection checks each one's work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ..base.errors import ConfigError, ForgeError, PluginError, during, locate
from ..base.format import place
from ..contract.model import Init, Model
from ..contract.transform import Applied, Phase, Transform
from ..plugin import hookspecs
from ..plugin.calls import EnabledPlugin, plugin_note, without
from ..plugin.job import Job
from .coverage import check_coverage, needed
from .initialise import declared, materialise, retie, tied_groups

Named = tuple[str, Transform]  # with the name of its plugin


@dataclass
class Composition:
    """Result of composing a model, in order of application."""

    model: Model
    report: list[dict[str, Any]] = field(default_factory=list)
    """`phase`, `slot`, `plugin`, `matched`, `note` of each transform, as in composition.json."""
    idle: tuple[str, ...] = ()
    """Plugins that could transform, and have nothing to do at this size."""
    starts: Mapping[str, Init] = field(default_factory=dict)
    """Initial value of each parameter."""
    expected_bytes: Mapping[str, float] = field(default_factory=dict)
    """Mesh axis → bytes that a rank has to send along it in a step, by the transforms' own count."""
    extra: Sequence[tuple[Job, Composition]] = ()
    """The extra models, each with its own job."""

    @during("build")
    def allocate(self, job: Job) -> None:
        """Give the model, and the extra ones, memory and initial weights."""
        for part in self.model.parts:
            materialise(part, job.device, job.seed, self.starts)
        for own, composition in self.extra:
            composition.allocate(own)


@during("build")
def compose(
    job: Job, *, allocate: bool = True, extra: bool = True, change: Callable[[nn.Module], None] | None = None
) -> Composition:
    """Build the model, apply every transform to every part, give it memory and initial weights.

    Args:
        job: whose hooks build and transform.
        allocate: whether to give memory and weights at once.
        extra: whether plugins' extra models are composed too.
        change: is called with the model as it was built, before any transform.

    Raises:
        ConfigError: for a composition that can't be.
        PluginError: for a transform that broke an invariant.
    """
    composition = compose_one(job, change=change)
    if extra:
        composition.extra = job.hooks.compose_extra(job, composition)
    if allocate:
        composition.allocate(job)
    return composition


def compose_one(job: Job, *, frozen: bool = False, change: Callable[[nn.Module], None] | None = None) -> Composition:
    """Build one model on the meta device, and apply every transform to every part.

    Args:
        job: whose hooks build and transform.
        frozen: whether nothing of it is trained.
        change: is called with the model as it was built, before any transform.
    """
    with torch.device("meta"), job.hooks.inspection.building(job.config):
        parts = [hookspecs.build_model(job)]
    if change is not None:
        change(parts[0])
    if frozen:
        parts[0].requires_grad_(False)
    starts = declared(parts[0])
    transforms = order(needed(offered := hookspecs.parallelize(job)), job.hooks.enabled)
    applied: list[tuple[int | None, Applied]] = []
    report: list[dict[str, Any]] = []
    for plugin, transform in transforms:
        ties, before = tied_groups(*parts), job.hooks.inspection.before(parts)
        done = [_apply(job, plugin, transform, part) for part in parts]
        parts = [part for one in done for part in _parts(one)]
        matched = [name for one in done for name in one.matched]
        if frozen:
            for part in parts:
                part.requires_grad_(False)
        who = f"Plugin {job.hooks.enabled[plugin].ref.label}, {transform.slot!r}"
        copies = {name for one in done for name in one.copies}
        retie_all = partial(_check_ties, who, ties, parts, copies)
        job.hooks.inspection.transformed(job, plugin, who, before, parts, done, retie_all, frozen=frozen)
        applied += [(None if transform.phase is Phase.PIPELINE else index, one) for index, one in enumerate(done)]
        note = "; ".join(dict.fromkeys(one.note for one in done if one.note))
        report.append(
            {
                "phase": transform.phase.name,
                "slot": transform.slot,
                "plugin": plugin,
                "matched": sorted(job.dist.gather_names(matched)),
                "note": note,
            }
        )
    check_coverage(job, (transform for _, transform in transforms))
    job.hooks.at_stage(job.hooks, job.config, "composition")
    acting = {plugin for plugin, _ in offered}  # a fallback is not idle: another plugin does its work
    idle = tuple(name for name in job.hooks.implementers("parallelize") if name not in acting)
    expected_bytes: Counter[str] = Counter()
    for _, one in applied:
        expected_bytes.update(one.expected_bytes)
    return Composition(Model(parts, applied), report, idle, starts, expected_bytes)


def order(transforms: Iterable[Named], enabled: Mapping[str, EnabledPlugin] = MappingProxyType({})) -> list[Named]:
    """Sort by phase, then `after` within the phase, then slot; nothing else plays a part.

    Args:
        transforms: of all plugins.
        enabled: the plugins by name, for messages.

    Raises:
        ConfigError: for two transforms of one slot, a slot that is missing or in conflict, a cycle of `after`.
    """
    by_slot: dict[str, Named] = {}
    for plugin, transform in transforms:
        if other := by_slot.get(transform.slot):
            both = sorted((other[0], plugin))
            way_out = without(enabled[name] for name in {*both} & enabled.keys())
            names = " and ".join(map(repr, both))
            raise ConfigError(f"Plugins {names} both fill the slot {transform.slot!r}; {way_out}.")
        by_slot[transform.slot] = (plugin, transform)
    for plugin, transform in by_slot.values():
        for slot in transform.requires:
            if slot not in by_slot:
                raise ConfigError(f"Plugin {plugin!r} requires the slot {slot!r}, which no enabled plugin fills.")
        for slot in transform.conflicts:
            if slot in by_slot:
                raise ConfigError(f"Plugins {plugin!r} and {by_slot[slot][0]!r} can't be composed: {slot!r} conflicts.")
    ordered: list[Named] = []
    for phase in Phase:
        waiting = {slot: named for slot, named in sorted(by_slot.items()) if named[1].phase is phase}
        while waiting:
            ready = next((s for s, (_, t) in waiting.items() if not any(a in waiting for a in t.after)), None)
            if ready is None:
                raise ConfigError(f"The `after` of slots {', '.join(map(repr, waiting))} form a cycle.")
            ordered.append(waiting.pop(ready))
    for at, (plugin, transform) in enumerate(ordered):
        for slot in transform.after:
            if slot in by_slot and by_slot[slot] in ordered[at + 1 :]:
                raise ConfigError(
                    f"Plugin {plugin!r}: {transform.slot!r} asks to come after {slot!r}, which is of the later phase "
                    f"{by_slot[slot][1].phase.name}. `after` orders within a phase only."
                )
    return ordered


def _apply(job: Job, plugin: str, transform: Transform, part: nn.Module) -> Applied:
    found = job.hooks.enabled[plugin].ref
    try:
        done = transform.apply(part)
    except Exception as error:
        locate(error, plugin=plugin, hook="parallelize")
        if not isinstance(error, ForgeError):
            error.add_note(plugin_note(found, f"parallelize ({transform.slot})"))
        raise
    whose = f"{job.hooks.whose('parallelize', plugin)}: {transform.slot!r} ({place(transform.apply)})"
    kind = job.hooks.inspection.of(Applied)
    if text := kind.problem(done):
        raise PluginError(f"{whose} must return {kind.words}, {text}.")
    if isinstance(done.model, list) and transform.phase is not Phase.PIPELINE:
        raise PluginError(f"{whose} gives several parts; only a PIPELINE transform may give several parts.")
    return done


def _parts(done: Applied) -> list[nn.Module]:
    return done.model if isinstance(done.model, list) else [done.model]


def _check_ties(who: str, ties: list[tuple[str, ...]], parts: list[nn.Module], copies: set[str]) -> None:
    """Tie again what a transform has untied, and check that every tie is in one part."""
    for names in ties:
        group = tuple(name for name in names if name not in copies)
        homes = [
            part for part in parts if any(name in group for name, _ in part.named_parameters(remove_duplicate=False))
        ]
        present = {name for part in parts for name, _ in part.named_parameters(remove_duplicate=False)} & set(group)
        if not present:
            continue  # a pipeline put all of them on another rank
        if len(homes) > 1 or present != set(group):
            raise ConfigError(
                f"{who} would put the tied parameters {' and '.join(group)} into different parts, where each would be "
                "trained alone; untie them in the model's configuration."
            )
        if failed := retie(homes[0], [group]):
            raise PluginError(f"{who} untied {', '.join(failed)} from {group[0]}, and they no longer fit each other.")
