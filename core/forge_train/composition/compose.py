"""Composition: the only place that applies transforms, in the mandated order, and checks what each one did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError, ForgeError, PluginError, locate
from ..job import Job
from ..protocols import Init
from ..registry.calls import Enabled, blame, without
from ..registry.discovery import discover
from ..registry.places import place
from ..registry.returns import kind_of
from ..registry.unused import note_unused
from ..transform import HOOK_TABLES, Applied, Phase, Transform
from .initialise import declared, materialise, retie, tied_groups
from .model import Model

Named = tuple[str, Transform]
"""A transform with the name of its plugin."""


@dataclass
class Composition:
    """What was composed, in order."""

    model: Model
    report: list[dict[str, Any]] = field(default_factory=list)
    """`phase`, `slot`, `plugin`, `matched`, `note` of each transform, as in composition.json."""
    idle: tuple[str, ...] = ()
    """Plugins that could transform, and have nothing to do at this size."""
    starts: Mapping[str, Init] = field(default_factory=dict)
    """How every parameter starts."""
    textbook: Mapping[str, float] = field(default_factory=dict)
    """Mesh axis → bytes that a rank has to send along it in a step, by the transforms' own count."""

    def allocate(self, job: Job) -> None:
        """Give the model memory and its initial weights."""
        for part in self.model.parts:
            materialise(part, job.device, job.seed, self.starts)


def compose(job: Job, *, allocate: bool = True) -> Composition:
    """Build the model, apply every transform to every part, give it memory and initial weights.

    Raises:
        ConfigError: for a composition that can't be.
        PluginError: for a transform that broke an invariant.
    """
    with torch.device("meta"):
        parts = [job.hooks.build_model()]
    starts = declared(parts[0])
    transforms = order(needed(job.hooks.parallelize()), job.hooks.enabled)
    applied: list[Applied] = []
    report: list[dict[str, Any]] = []
    for plugin, transform in transforms:
        before = _Snapshot.of(parts)
        done = [_apply(job, plugin, transform, part) for part in parts]
        parts = [part for one in done for part in _parts(one)]
        matched = [name for one in done for name in one.matched]
        _check(job, plugin, transform, before, parts, done)
        applied += done
        note = "; ".join(dict.fromkeys(one.note for one in done if one.note))
        report.append(
            {
                "phase": transform.phase.name,
                "slot": transform.slot,
                "plugin": plugin,
                "matched": sorted({name for names in job.dist.gather_objects(matched) for name in names}),
                "note": note,
            }
        )
    _check_coverage(job, transforms)
    note_unused(job.hooks, job.config, "composition")
    acting = {plugin for plugin, _ in transforms}
    idle = tuple(name for name in job.hooks.implementers("parallelize") if name not in acting)
    textbook: Counter[str] = Counter()
    for one in applied:
        textbook.update(one.textbook)
    composition = Composition(Model(parts, applied), report, idle, starts, textbook)
    if allocate:
        composition.allocate(job)
    return composition


def needed(transforms: Sequence[Named]) -> list[Named]:
    """Without the fallbacks for what others cover."""
    covered = {axis for _, transform in transforms if not transform.fallback for axis in transform.covers}
    return [named for named in transforms if not (named[1].fallback and covered.issuperset(named[1].covers))]


def order(transforms: Iterable[Named], enabled: Mapping[str, Enabled] = MappingProxyType({})) -> list[Named]:
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
    found = job.hooks.enabled[plugin].found
    try:
        done = transform.apply(part)
    except Exception as error:
        locate(error, plugin=plugin, hook="parallelize")
        if not isinstance(error, ForgeError):
            error.add_note(blame(found, f"parallelize ({transform.slot})"))
        raise
    whose = f"{job.hooks.whose('parallelize', plugin)}: {transform.slot!r} ({place(transform.apply)})"
    kind = kind_of(Applied)
    if text := kind.problem(done):
        raise PluginError(f"{whose} must return {kind.words}, {text}.")
    if isinstance(done.model, list) and transform.phase is not Phase.PIPELINE:
        raise PluginError(f"{whose} gives several parts; only a PIPELINE transform may give several parts.")
    return done


def _parts(done: Applied) -> list[nn.Module]:
    return done.model if isinstance(done.model, list) else [done.model]


@dataclass
class _Snapshot:
    """What must still hold after a transform."""

    names: set[str]
    hooks: list[tuple[str, str, Any]]
    """Module path, table, hook."""
    ties: list[tuple[str, ...]]

    @classmethod
    def of(cls, parts: Sequence[nn.Module]) -> _Snapshot:
        return cls(
            {name for part in parts for name, _ in part.named_parameters(remove_duplicate=False)},
            [
                (path, table, hook)
                for part in parts
                for path, module in part.named_modules()
                for table in HOOK_TABLES
                for hook in getattr(module, table, {}).values()
                if callable(hook)
            ],
            tied_groups(*parts),
        )


def _check(
    job: Job, plugin: str, transform: Transform, before: _Snapshot, parts: list[nn.Module], done: list[Applied]
) -> None:
    """Each of these was seen to go wrong without a sound."""
    who = f"Plugin {job.hooks.enabled[plugin].found.label}, {transform.slot!r}"
    counts = job.dist.gather_objects(sum(len(one.matched) for one in done))
    if not any(counts):
        raise ConfigError(
            f"{who} matched nothing in this model; {without([job.hooks.enabled[plugin]])}, or mend its filter."
        )
    after = _Snapshot.of(parts)
    if twice := _in_several(parts):
        raise PluginError(f"{who} left parameters in several parts{_few('twice', twice)}; each part has its own.")
    names = {name for some in job.dist.gather_objects(after.names) for name in some}
    wanted = {name for some in job.dist.gather_objects(before.names) for name in some}
    wanted |= {name for one in done for name in one.added}
    if names != wanted:
        lost, new = sorted(wanted - names), sorted(names - wanted)
        raise PluginError(
            f"{who} changed parameter names{_few('lost', lost)}{_few('new', new)}. Act on the module itself instead of "
            "wrapping it, and name new parameters in Applied.added."
        )
    kept = {(path, table, id(hook)) for path, table, hook in after.hooks}
    for path, table, hook in before.hooks:
        if (path, table, id(hook)) not in kept and _is_here(path, parts):
            raise PluginError(f"{who} lost a hook of module {path!r} ({table}); replace modules with forge_train.swap.")
    _check_ties(who, before.ties, parts)


def _is_here(path: str, parts: list[nn.Module]) -> bool:
    """Whether a module lies on this rank; a pipeline moves others elsewhere."""
    return len(parts) == 1 or any(path in dict(part.named_modules()) for part in parts)


def _check_ties(who: str, ties: list[tuple[str, ...]], parts: list[nn.Module]) -> None:
    for group in ties:
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


def _in_several(parts: Sequence[nn.Module]) -> list[str]:
    """Parameters that would be trained in one part and in another; tied ones are judged by `_check_ties`."""
    homes: dict[str, set[int]] = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            homes.setdefault(name, set()).add(id(parameter))
    return sorted(name for name, parameters in homes.items() if len(parameters) > 1)


def _few(label: str, names: list[str]) -> str:
    more = f", … {len(names) - 3} more" if len(names) > 3 else ""
    return f"; {label}: {', '.join(names[:3])}{more}" if names else ""


def _check_coverage(job: Job, transforms: list[Named]) -> None:
    covered = {axis for _, transform in transforms for axis in transform.covers}
    for axis, size in job.dist.layout.axes().items():
        if size > 1 and axis not in covered:
            raise ConfigError(
                f"parallel.{axis} is {size}, but no enabled plugin covers the axis {axis!r}.{_covering(job, axis)}"
            )
    precision = job.config.train.precision
    if precision != "fp32" and "precision" not in covered:
        raise ConfigError(
            f"train.precision is {precision!r}, but no enabled plugin covers 'precision'.{_covering(job, 'precision')}"
        )


def _covering(job: Job, axis: str) -> str:
    """The installed plugins that would cover it."""
    names = sorted(found.name for found in discover() if axis in found.covers and found.name not in job.hooks.enabled)
    return f" Installed plugins that do: {', '.join(names)}; enable one with --plugins." if names else ""
