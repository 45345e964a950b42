"""Checks with a state map that a folder in Hugging Face layout has exactly a model's tensors; plans an export."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path

import torch

from forge_train.base.errors import ConfigError, PluginError
from forge_train.base.format import format_list

from ..format import format_lines
from ..state_map import Plan, Step
from ..state_map.views import View
from .folder import CONFIG, DTYPES, Folder
from .model import HFModel

Shape = tuple[int, ...]
Described = Mapping[str, tuple[Shape, torch.dtype]]
Choose = Callable[[Iterable[str]], Iterable[str]]


def plan(
    folder: Folder,
    layout: HFModel,
    wanted: Described,
    *,
    whose: str = CONFIG,
    way_out: str = "",
    tied: Iterable[Collection[str]] = (),
    options: tuple[str, str] = ("train.init_missing", "train.init_unexpected"),
    missing: Choose = lambda _: (),
    unexpected: Choose = lambda _: (),
    ignored: Choose = lambda _: (),
) -> Plan:
    """Plan how a folder's tensors become a model's weights, if it holds exactly those. Reads only duplicates of tied
    ones.

    Args:
        folder: an opened folder.
        layout: the description of its model from `import_hf`.
        wanted: shape and dtype of every weight of the model, including those of other ranks and stages.
        whose: what describes the model, for messages.
        way_out: the last line of the error if the model is not the one in the files.
        tied: groups of names that share one parameter; the folder may hold copies of its tensor.
        options: which let a user choose what `missing` and `unexpected` take, for messages.
        missing: chooses weights that may be absent, among those that no tensor gives and the tensors that are missing
            or have another shape; these weights keep their initial values.
        unexpected: chooses tensors that the folder may have in addition, among those that the layout does not use.
        ignored: chooses weights to leave out, among those that the layout names; the model's weights of these names
            keep their initial values.

    Raises:
        ConfigError: naming every difference.
        PluginError: if the layout does not name the parameters of the model that was built from it.
    """
    leftovers = _leftovers(folder, layout, wanted)
    stored = {name: one for name, one in folder.described().items() if name not in leftovers}
    layout, step = _fitting(layout, stored, wanted)
    given = step.given
    beside = {name: given[name] for name in (*ignored(sorted(given)), *_left_out(step, wanted, unexpected))}
    absent = {*missing(sorted(wanted.keys() - given.keys())), *beside}
    wanted = {name: one for name, one in wanted.items() if name not in absent}
    way_out = f"\n{way_out}" if way_out else ""
    lost = sorted(wanted.keys() - given.keys())
    headless = ""
    readable = folder.described().keys() == folder.tensors.keys()
    if lost and readable and not step.left and all(name.startswith("head.") for name in lost):
        headless = (
            f"{folder.path} has no weights for the head ({format_list(lost)}). Name a folder that holds the whole "
            f"model, or begin a new head with {_set(options[0], lost)}{way_out}"
        )
    described = {**wanted, **{name: (view.shape, view.dtype) for name, view in beside.items()}}
    foreign = _sources(step, sorted(given.keys() - described.keys()))
    expected = _expected(folder, layout, described, foreign, options, whose, way_out, headless)
    unfit = _unfit(folder, expected or {}, whose)
    lacking = {*missing(sorted(unfit))}
    extra = _extra(step, expected)
    beyond = {*unexpected(extra)}
    if lacking or beyond:
        step = _without(
            layout, stored, {name: shape for name, shape in (expected or {}).items() if name in lacking}, beyond
        )
    wrong = [line for name, line in unfit.items() if name not in lacking]
    if expected is None:
        wrong = _not_given(step, described, whose)
    wrong += [folder.odd(name) for name in folder.tensors if name not in {*stored, *leftovers, *lacking}]
    wrong += _unused(folder, step, [name for name in extra if name not in beyond], tied)
    if wrong or (wrong := step.wrong):
        if headless and all(": missing" in line for line in wrong):
            raise ConfigError(headless)
        told = f"{folder.path}: the tensors are not those of the model in {whose}:{format_lines(wrong)}"
        raise ConfigError(told + way_out + folder.quantised())
    return Plan({name: view for name, view in step.given.items() if name in wanted})


def _leftovers(folder: Folder, layout: HFModel, wanted: Described) -> list[str]:
    """The tensors that the layout declares unnecessary, unless a weight needs one."""
    leftovers = [name for name in folder.tensors if layout.is_leftover(name)]
    if not leftovers:
        return []
    everything = Plan(_fitting(layout, folder.described(), wanted)[1].given)
    needed = {source for name in everything.targets if name in wanted for source, _ in everything.reads(name)}
    return [name for name in leftovers if name not in needed]


def _sources(step: Step, names: Iterable[str]) -> list[str]:
    """The tensors that these weights are made of."""
    made = Plan(step.given)
    return sorted({source for name in names for source, _ in made.reads(name)})


def _left_out(step: Step, wanted: Described, unexpected: Choose) -> list[str]:
    """The weights that the layout names and the model does not have, and whose tensors a folder may have in
    addition."""
    foreign = {name: _sources(step, [name]) for name in sorted(step.given.keys() - wanted.keys())}
    chosen = {*unexpected(sorted({one for sources in foreign.values() for one in sources}))}
    return [name for name, sources in foreign.items() if chosen.issuperset(sources)]


def _extra(step: Step, expected: Mapping[str, Shape] | None) -> list[str]:
    """The tensors of a folder that the model does not have."""
    made = Plan(step.given)
    used = {source for name in made.targets for source, _ in made.reads(name)}
    return sorted({*step.left, *(used - expected.keys() if expected is not None else ())})


def _without(layout: HFModel, stored: Described, lacking: Mapping[str, Shape], beyond: Collection[str]) -> Step:
    """The step of a map without the tensors of `beyond`, and without the weights that need one of `lacking`. A weight
    that is made of several tensors, such as a stack of experts, is left out as a whole."""
    kept = {name: one for name, one in stored.items() if name not in beyond}
    ((usual, _),) = Counter(dtype for _, dtype in kept.values()).most_common(1) or [(torch.float32, 0)]
    kept |= {name: (shape, stored[name][1] if name in stored else usual) for name, shape in lacking.items()}
    step = layout.map.trace(kept)
    made = Plan(step.given)
    needing = {name for name in made.targets if any(source in lacking for source, _ in made.reads(name))}
    step.given = {name: view for name, view in step.given.items() if name not in needing}
    return step


def _unused(folder: Folder, step: Step, extra: Iterable[str], tied: Iterable[Collection[str]]) -> list[str]:
    """Problems with a map's results: dtypes that weights can't have, and tensors that no weight takes."""
    made = Plan(step.given)
    sources = {name: [*dict.fromkeys(source for source, _ in made.reads(name))] for name in made.targets}
    wrong: list[str] = []
    for name, view in made.targets.items():
        if view.dtype not in DTYPES.values():
            wrong += [folder.odd(one) for one in sources[name] if folder.tensors[one].dtype not in DTYPES]
    copied = [source for group in tied for name in group for source in sources.get(name, ())]
    for name in extra:
        wrong += _is_a_copy(folder, name, copied)
    return wrong


def _fitting(layout: HFModel, stored: Described, wanted: Described) -> tuple[HFModel, Step]:
    """The layout with the map that gives the most weights, among all that files may follow, and its step."""
    tried: list[tuple[HFModel, Step]] = []
    for one in (layout.map, *layout.others):
        tried.append((replace(layout, map=one), one.trace(stored)))
        if wanted.keys() <= tried[-1][1].given.keys():
            return tried[-1]
    return max(tried, key=lambda pair: len(wanted.keys() & pair[1].given.keys()))


def _expected(
    folder: Folder,
    layout: HFModel,
    wanted: Described,
    foreign: Sequence[str],
    options: tuple[str, str],
    whose: str,
    way_out: str,
    headless: str,
) -> dict[str, Shape] | None:
    """The tensors that a folder of this model should have; None if the map has no inverse, so they are unknown."""
    try:
        back = layout.map.inverse()
    except ConfigError:
        return None
    step = back.trace(wanted)
    lines = [*(f"{name}: not named" for name in sorted(step.left)), *step.wrong]
    if step.left and headless:
        raise ConfigError(headless)
    if lines and foreign:
        raise ConfigError(
            f"{folder.path} holds {format_list(foreign)}, which no parameter of this model takes. Enable the plugins "
            f"of its model ({', '.join(layout.sections)}), or leave out what does not fit with "
            f"{_set(options[1], foreign)}"
        )
    if lines and whose != CONFIG:
        told = f"{folder.path / CONFIG} describes a different model than {whose}:{format_lines(lines)}"
        raise ConfigError(told + way_out)
    if step.left and not step.wrong:
        patterns = sorted({_added(name, wanted.keys() - step.left) for name in step.left})
        raise ConfigError(
            f"{folder.path} has no weights for parameters that a plugin added:{format_lines(lines)}\nTo start "
            f"them anew: " + _set(options[0], patterns)
        )
    if lines:
        raise PluginError("import_hf describes a different model than the one that was built:" + format_lines(lines))
    return {name: view.shape for name, view in step.given.items()}


def _added(name: str, others: Set[str]) -> str:
    """A pattern of an added parameter: of all in its module, where none of the others is, or of its last names."""
    first, *rest = name.split(".")
    if not any(one.startswith(f"{first}.") for one in others):
        return f"{first}.*" if rest else first
    return "*." + ".".join(name.split(".")[-2 if name.endswith((".weight", ".bias")) else -1 :])


def _set(option: str, patterns: Sequence[str]) -> str:
    """An option of the command line with these patterns."""
    if option.startswith("-"):
        return " ".join(f"{option} '{one}'" for one in patterns)
    return f"-s '{option}={json.dumps([*patterns], ensure_ascii=False)}'"


def _unfit(folder: Folder, expected: Mapping[str, Shape], whose: str) -> dict[str, str]:
    """The tensors that are missing or have another shape, each with a description."""
    unfit: dict[str, str] = {}
    for name, shape in expected.items():
        entry = folder.tensors.get(name)
        if entry is None:
            unfit[name] = f"{name}: missing ({_words(shape)})"
        elif entry.shape != shape:
            unfit[name] = f"{name}: {_words(entry.shape)} in {entry.file.name}, {_words(shape)} in {whose}"
    return unfit


def _not_given(step: Step, wanted: Described, whose: str) -> list[str]:
    """Like `_unfit`, but by forge's names."""
    wrong = list(step.wrong)
    for name, (shape, _) in wanted.items():
        view = step.given.get(name)
        if view is None:
            wrong.append(f"{name}: no tensor gives it ({_words(shape)})")
        elif view.shape != shape:
            wrong.append(f"{name}: {_words(view.shape)} in the files, {_words(shape)} in {whose}")
    return wrong + [f"{name}: not in the model" for name in step.given if name not in wanted]


def _is_a_copy(folder: Folder, name: str, copied: Iterable[str]) -> list[str]:
    """The problem with a tensor that no parameter takes; none if it is a copy of a tied one."""
    others = [other for other in copied if other in folder.tensors]
    if any(torch.equal(folder.read(name), folder.read(other)) for other in others):
        return []
    return [f"{name}: no parameter takes it" + (f", and it is not a copy of {', '.join(others)}" if others else "")]


def _words(shape: Shape) -> str:
    return " × ".join(map(str, shape)) or "a single number"


def plan_export(source: Path, layout: HFModel, stored: Mapping[str, View]) -> Plan:
    """Plan how to make a folder's tensors from a model's.

    Args:
        source: the run, checkpoint or folder, for errors.
        layout: the description of its model from `export_hf`.
        stored: every parameter and buffer.

    Raises:
        ConfigError: naming tensors that have no place in the layout.
    """
    step = Step(stored)
    layout.map.inverse().apply(step)
    if step.left:
        raise ConfigError(f"{source}: the Hugging Face layout has no place for" + format_lines(sorted(step.left)))
    if step.wrong:
        raise ConfigError(
            f"{source}: its tensors don't match the description from export_hf:" + format_lines(step.wrong)
        )
    return Plan(step.given)
