"""Units that are alike: a few of them tell what any number of them would keep, send and compute.

The model is composed with some of the units that repeat, with one repetition more, and with two more. How the logs of
the three rehearsals grow is then laid out to the full number (`growth`). Where no rule says exactly how they grow, or a
unit is unlike its neighbours, the whole model has to be rehearsed.
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from forge_train.base.errors import ConfigError
from forge_train.compose.compose import Composition, compose
from forge_train.mesh.tensors import local
from forge_train.plugin.job import Job
from forge_train_kit.modules import HOOK_TABLES

from ..facts import PER_UNIT
from .growth import grown, rule
from .record import Recorded
from .rehearsal import rehearse

FEW = 3
"""Repetitions in the shortest rehearsal: the first, the last, and one whose neighbours are like it."""
WORTH = 4 * FEW
"""Repetitions from which three short rehearsals take less time than a whole one."""
LONGEST = 8
"""Units of the longest repetition that is looked for."""
ASKED = ("build_model", "attention", "feed_forward", "fusion", "modalities", "task", "executor", "optimizer")
"""Hooks whose plugins build units or see all of them."""
DEPTH = 4
"""Levels of a module's attributes that are compared; below, their classes are."""
PLAIN = (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, NoneType)
_OWN = frozenset(vars(nn.Module()))

Form = Mapping[tuple[str, ...], Hashable]
"""Facts about a unit: place → fact."""


@dataclass(frozen=True)
class Pattern:
    """Units that repeat: after `first` of them, `size` units come `times` times."""

    first: int
    size: int
    times: int


class Units:
    """The units of a model, as they were built and as they were composed.

    Args:
        gone: positions of units that are left out, as a pipeline leaves them out.
    """

    def __init__(self, gone: Sequence[int] = ()) -> None:
        self.gone = gone
        self.names: tuple[str, ...] = ()
        self.built: list[Form] = []

    def look(self, part: nn.Module) -> None:
        """Leave units out of a model that was just built, and see what the others are like."""
        if self.gone:
            _remove(part, self.gone)
        names = tuple(getattr(part, "units", ()))
        if names != self.names:  # every stage of a pipeline builds the same model
            self.names = names
            self.built = [dict(_attributes(name, part.get_submodule(name))) for name in names]

    def forms(self, composition: Composition) -> list[Form]:
        """Return the facts about each unit."""
        (part,) = composition.model.parts
        names = tuple(getattr(part, "units", ()))
        matched = _matched(names, composition)
        composed = [{**_composed(name, part.get_submodule(name)), **matched[name]} for name in names]
        return [{**form, **more} for form, more in zip(self.built, composed, strict=True)]


def rehearse_alike(job: Job, composition: Composition, units: Units, *, least: int = WORTH) -> Recorded | None:
    """Return the record that `rehearse` would make, from short rehearsals; None if that can't be known exactly.

    Args:
        job: as for `rehearse`.
        composition: the whole one, on the meta device.
        units: have looked at it when it was built.
        least: repetitions below which nothing is saved.
    """
    if len(composition.model.parts) != 1 or composition.extra or not per_unit(job, composition):
        return None
    forms = units.forms(composition)
    own = _positions(forms)
    whole = [_without(form, own) for form in forms]
    found = pattern(whole)
    if found is None or found.times < max(least, FEW + 3):
        return None
    records = []
    for times in (FEW, FEW + 1, FEW + 2):
        gone = range(found.first + found.size * times, found.first + found.size * found.times)
        some = Units(gone)
        try:
            short = compose(job, allocate=False, change=some.look)
        except _CannotError:
            return None
        if [_without(form, own) for form in some.forms(short)] != [*whole[: gone.start], *whole[gone.stop :]]:
            return None
        try:
            records.append(rehearse(job, short.model))
        except ConfigError:  # a pattern of a section may match a unit that was left out
            return None
    return _laid_out(records, found.times - FEW)


def per_unit(job: Job, composition: Composition) -> bool:
    """Return True if every plugin that builds units or sees all of them declares that it acts unit by unit."""
    seeing = {name for hook in ASKED for name in job.hooks.acting(hook)}
    seeing |= {entry["plugin"] for entry in composition.report}
    return all(PER_UNIT.of(job.hooks.enabled[name].cls) for name in seeing)


def pattern(forms: Sequence[object]) -> Pattern | None:
    """The longest stretch of units that repeats."""
    best: Pattern | None = None
    for size in range(1, LONGEST + 1):
        first = 0
        for at in range(len(forms) + 1):
            if at >= len(forms) or (at - first >= size and forms[at] != forms[at - size]):
                times = (at - first) // size
                if times > 1 and (best is None or times * size > best.times * best.size):
                    best = Pattern(first, size, times)
                first = max(first, at - size + 1)
    return best


def repeating(units: Units) -> Pattern | None:
    """The longest stretch of units that repeats, as they were built."""
    own = _positions(units.built)
    return pattern([_without(form, own) for form in units.built])


def _laid_out(records: Sequence[Recorded], more: int) -> Recorded | None:
    first, second, third = records
    if any(record.failed or record.notes != first.notes for record in records):
        return None
    changes, calls = rule([record.changes for record in records]), rule([record.calls for record in records])
    sizes: dict[str, Any] = {}
    for name in ("parameters", "buffers", "gradients", "optimizer"):
        a, b, c = (getattr(record, name) for record in (first, second, third))
        if c - b != b - a:
            return None
        sizes[name] = a + more * (b - a)
    if changes is None or calls is None:
        return None
    return replace(first, **sizes, changes=list(grown(changes, more)), calls=list(grown(calls, more)))


class _CannotError(Exception):
    """The model does not let its units go."""


def _remove(part: nn.Module, positions: Sequence[int]) -> None:
    """Leave units out, as a pipeline does."""
    units = tuple(getattr(part, "units", ()))
    for name in reversed([units[at] for at in positions]):
        parent, _, key = name.rpartition(".")
        holder = part.get_submodule(parent)
        if isinstance(holder, nn.ModuleDict):
            del holder[key]
        elif isinstance(holder, (nn.ModuleList, nn.Sequential)):
            del holder[int(key)]
        else:
            raise _CannotError
    if len(tuple(getattr(part, "units", ()))) != len(units) - len(positions):
        raise _CannotError


def form_of(part: nn.Module, units: Units) -> Hashable:
    """Return the facts about one part of a pipeline; equal for parts that compute alike, whichever units they have.

    Args:
        part: composed.
        units: have looked at the model when it was built.
    """
    names = tuple(getattr(part, "units", ()))
    inside = tuple(f"{name}." for name in names)
    outside = [
        (n, _tensor(p)) for n, p in (*part.named_parameters(), *part.named_buffers()) if not n.startswith(inside)
    ]
    own = _positions(units.built)
    built = dict(zip(units.names, units.built, strict=True))
    inner = [frozenset({**_without(built[n], own), **_composed(n, part.get_submodule(n))}.items()) for n in names]
    return tuple(outside), tuple(inner)


# -- what a unit is like --------------------------------------------------------------------------


def _positions(forms: Sequence[Form]) -> set[tuple[str, ...]]:
    """Return the places where units hold their own index."""
    found: dict[tuple[str, ...], int] = {}
    wrong: set[tuple[str, ...]] = set()
    for at, form in enumerate(forms):
        for place, value in form.items():
            found[place] = found.get(place, 0) + 1
            if value != (int, at):
                wrong.add(place)
    return {place for place, times in found.items() if times > FEW} - wrong


def _without(form: Form, places: set[tuple[str, ...]]) -> Form:
    return {place: value for place, value in form.items() if place not in places}


def _attributes(name: str, unit: nn.Module) -> Iterator[tuple[tuple[str, ...], Hashable]]:
    """Yield the attributes that its modules got when they were built."""
    for path, module in unit.named_modules():
        for key, value in vars(module).items():
            if key not in _OWN:
                yield (path, key), _plain(value, name, DEPTH)


def _composed(name: str, unit: nn.Module) -> Form:
    """Return the facts that transforms changed, as far as modules show them."""
    form: dict[tuple[str, ...], Hashable] = {}
    for path, module in unit.named_modules():
        form[path, "class"] = tuple(f"{cls.__module__}.{cls.__qualname__}" for cls in type(module).__mro__)
        forward = vars(module).get("forward", type(module).forward)
        form[path, "forward"] = _plain(forward, name, DEPTH)
        for key, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            form[path, "tensor", key] = _tensor(tensor)
        for table in HOOK_TABLES:
            hooks = getattr(module, table).values()
            form[path, table] = tuple(_plain(hook, name, DEPTH) for hook in hooks)
    return form


def _matched(units: Sequence[str], composition: Composition) -> dict[str, Form]:
    """Unit → which of its modules each transform changed."""
    found: dict[str, dict[tuple[str, ...], Hashable]] = {name: {} for name in units}
    for entry in composition.report:
        for path in entry["matched"]:
            above = (path, *(path[:at] for at in range(len(path) - 1, 0, -1) if path[at] == "."))
            if unit := next((name for name in above if name in found), None):
                found[unit][entry["slot"], "matched", path[len(unit) :]] = True
    return dict(found)


def _tensor(tensor: Tensor) -> Hashable:
    placements = tuple(map(str, getattr(tensor, "placements", ())))
    return tuple(tensor.shape), tuple(local(tensor).shape), tensor.dtype, tensor.requires_grad, placements


def _plain(value: Any, name: str, depth: int) -> Hashable:
    """A value without what only says which unit it belongs to."""
    if isinstance(value, str):
        return value.replace(name, "*")
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, Tensor):
        return _tensor(value)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, DeviceMesh):  # of whichever ranks
        return kind, value.mesh_dim_names, tuple(value.shape)
    if isinstance(value, type):
        return kind, f"{value.__module__}.{value.__qualname__}"
    if depth == 0 or isinstance(value, nn.Module):
        return kind
    return kind, _inside(value, name, depth)


def _inside(value: Any, name: str, depth: int) -> Hashable:
    """Return the contents of a value."""

    def inner(*items: Any) -> Hashable:
        return tuple(_plain(item, name, depth - 1) for item in items)

    if isinstance(value, (list, tuple)):
        return inner(*value)
    if isinstance(value, Mapping):
        return inner(*map(str, value)), inner(*value.values())
    if isinstance(value, functools.partial):
        return inner(value.func, value.args, value.keywords)
    if inspect.ismethod(value):  # of its object, which may hold all that a transform knows, the plain values
        own = {key: item for key, item in getattr(value.__self__, "__dict__", {}).items() if isinstance(item, PLAIN)}
        return inner(value.__func__, type(value.__self__), own)
    if inspect.isfunction(value):
        cells = (cell.cell_contents for cell in value.__closure__ or ())
        return value.__code__, inner(*cells), inner(value.__defaults__, value.__kwdefaults__)
    attributes = {slot: getattr(value, slot, None) for slot in getattr(type(value), "__slots__", ())}
    attributes |= getattr(value, "__dict__", {})
    return tuple(attributes), inner(*attributes.values())
