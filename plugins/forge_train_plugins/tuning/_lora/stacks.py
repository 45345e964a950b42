"""Stacks of experts as the classes of transformers hold them: parameters, each of one stack or of several."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge_train_kit.hf.start import imported
from forge_train_kit.state_map import Step, View
from forge_train_kit.state_map.views import Joined, Selected, Stored

if TYPE_CHECKING:
    from forge_train import Job
    from forge_train_kit.hf import HFModel


@dataclass(frozen=True)
class Fused:
    """A parameter of such a class, `[experts, out, in]`.

    Args:
        name: the parameter's.
        experts: number of them.
        pieces: the stacks that it consists of, in the order of its output features.
        rows: number of output features of each.
    """

    name: str
    experts: int
    pieces: tuple[str, ...]
    rows: tuple[int, ...]


def fused(job: Job, layout: HFModel, stored: Mapping[str, View]) -> dict[str, Fused]:
    """Those of a model by name, in the order of their first stacks. Files may hold experts one by one; the layouts that
    an import accepts have the parameters in memory too.

    Args:
        job: the model's.
        layout: of the model.
        stored: its parameters, without updates.
    """
    read = imported(dict(layout.config), job.hooks)
    found: dict[str, Fused] = {}
    for one in (layout.map, *((read.map, *read.others) if read is not None else ())):
        step = Step(stored)
        one.inverse().apply(step)
        found |= {name: made for name, view in step.given.items() if (made := _fused(name, view)) is not None}
    places = {name: at for at, name in enumerate(stored)}
    return dict(sorted(found.items(), key=lambda item: places[item[1].pieces[0]]))


def _fused(name: str, view: View) -> Fused | None:
    pieces: tuple[tuple[View, int, int], ...] = ()
    if isinstance(view, Stored) and len(view.shape) == 3:
        pieces = ((view, 0, view.shape[1]),)
    if isinstance(view, Joined) and len(view.shape) == 3 and view.dim == 1:
        pieces = view.pieces
    stacks = [one for one, start, stop in pieces if isinstance(one, Stored) and (start, stop) == (0, one.shape[1])]
    if not stacks or len(stacks) < len(pieces):
        return None
    return Fused(name, view.shape[0], tuple(one.name for one in stacks), tuple(one.shape[1] for one in stacks))


def ends_of_experts(layout: HFModel, stored: Mapping[str, View]) -> set[str]:
    """Last parts of the names of linears in single experts, where files hold them one by one: `gate_proj`."""
    step = Step(stored)
    layout.map.inverse().apply(step)
    return {
        name.removesuffix(".weight").rpartition(".")[2]
        for name, view in step.given.items()
        if isinstance(view, Selected)
    }


def nested(known: Mapping[str, Fused], updated: Collection[str]) -> dict[str, str]:
    """Updated parameter → the module that has its factors in PEFT: it wraps a module once for each updated parameter,
    the first one innermost, and `base_layer` is what a wrapper wraps."""
    modules: dict[str, list[str]] = {}
    for name in known:
        if name in updated:
            modules.setdefault(name.rpartition(".")[0], []).append(name)
    return {
        name: module + ".base_layer" * (len(names) - 1 - at)
        for module, names in modules.items()
        for at, name in enumerate(names)
    }
