"""States of plugins on both sides, and what a resume makes of them: comparisons, and what they suggest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forge_train.base.format import format_list

from .numbers import finite
from .verdict import Check, Verdict
from .watched import DATA, PLUGINS

if TYPE_CHECKING:
    from torch import Tensor

    from .follow import Followed
    from .recording import Recording

STATE = 1e-4
"""Relative (Frobenius) error of a tensor in a plugin's state, given the layout's gradients."""
NUMBER = 1e-3
"""Relative error of a number there, which may come of a loss or a norm."""


@dataclass(frozen=True)
class StateApart:
    """A tensor or a number of a plugin's state."""

    plugin: str
    key: str
    error: float
    """Relative; infinite where one side lacks it."""
    says: str = ""
    """Its actual value or state."""

    def __str__(self) -> str:
        return f"{self.key} of {self.plugin}"


Side = tuple["Mapping[str, Tensor]", Mapping[str, Any]]
"""All tensors by name, and the other values of plugins' states."""


def states_apart(mine: Side, theirs: Side, but: str | None) -> list[StateApart]:
    """Everything in plugins' states, the worst first.

    Args:
        mine: of one process that followed a layout.
        theirs: of the layout.
        but: the plugin that gives the data: its position is compared elsewhere.
    """
    found = []
    for name in sorted(mine[0].keys() | theirs[0].keys()):
        owner, _, rest = name.partition(".")
        plugin, _, key = rest.partition(".")
        if owner == PLUGINS and plugin != but:
            found.append(_tensors(plugin, key, mine[0], theirs[0], name))
    ours, others = (dict(_numbers(side[1])) for side in (mine, theirs))
    for plugin, key in sorted(ours.keys() | others.keys()):
        if plugin != but:
            one, other = ours.get((plugin, key), math.nan), others.get((plugin, key), math.nan)
            gap = 0.0 if str(one) == str(other) else finite(abs(one - other) / (abs(one) or 1.0))
            gap = 0.0 if gap <= NUMBER else gap
            found.append(StateApart(plugin, key, gap, f"it is {one:.7g} on one process and {other:.7g} there"))
    return sorted(found, key=lambda one: -one.error)


def _tensors(plugin: str, key: str, mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor], name: str) -> StateApart:
    one, other = mine.get(name), theirs.get(name)
    if one is None or other is None or one.shape != other.shape:
        return StateApart(plugin, key, math.inf, "it is missing on one side, or of another shape")
    gap = float((other.double().cpu() - one.double()).norm())
    weight = next((w for w in (theirs.get(f"model.{key[at:]}") for at in _ends(key)) if w is not None), None)
    same = weight is not None and weight.shape == other.shape and bool((weight == other).all())
    says = "it is the weights themselves" if gap and same else ""
    return StateApart(plugin, key, finite(gap / (float(one.double().norm()) or 1.0)), says)


def _ends(key: str) -> Iterator[int]:
    """Yield the positions where a parameter's name may begin in a key."""
    yield from (at + 1 for at, letter in enumerate(key) if letter == ".")


def _numbers(tree: Mapping[str, Any], plugin: str = "", prefix: str = "") -> Iterator[tuple[tuple[str, str], float]]:
    for key, value in tree.items():
        owner, name = (plugin, f"{prefix}{key}") if plugin else (key, "")
        inner = dict(enumerate(value)) if isinstance(value, (list, tuple)) else value
        if isinstance(inner, Mapping):
            yield from _numbers({str(k): v for k, v in inner.items()}, owner, f"{name}." if name else "")
        elif isinstance(value, (int, float)):
            yield (owner, name), float(value)


def state_checks(followed: Followed) -> tuple[Check, ...]:
    """One check of plugins that have a state, none for others."""
    if not followed.states:
        return ()
    worst = followed.states[0]
    says = "relative, given the layout's gradients: the state of a plugin"
    return (Check("plugin states", worst.error, STATE, says, str(worst)),)


def resume_check(layout: Recording, followed: Followed) -> tuple[Check, ...]:
    """One check of a resume, if there was more than one step."""
    if len(layout.first.losses) < 2:
        return ()
    wrong = resumed_apart(layout)
    wrong += ["data position"] * (followed.position[0] != followed.position[1])
    says = "things that are different if the last step is taken again after a resume"
    return (Check("resume", len(wrong), 0, says, format_list(wrong)),)


def resumed_apart(layout: Recording) -> list[str]:
    """Return the names that differ after a resume, on any rank."""
    return sorted({name for rank in layout.ranks for name in rank.resumed})


def of_states(verdict: Verdict, followed: Followed) -> Iterator[str]:
    """Plugins whose state is not that of one process."""
    wrong = [one for one in followed.states if not one.error <= STATE and "plugin states" in verdict.failed]
    for plugin in dict.fromkeys(one.plugin for one in wrong):
        own = [one for one in wrong if one.plugin == plugin]
        said = next((one.says for one in own if one.says), "")
        yield (
            f"The state of plugin {plugin!r} ({format_list([one.key for one in own])}) is not what it is on one "
            f"process after the same steps{said and f': {said}'}. Its on_step makes something else of the same weights "
            "and numbers here, or its state_dict saves something else."
        )


def of_resume(verdict: Verdict, layout: Recording, followed: Followed) -> Iterator[str]:
    """Explain what a resume loses."""
    if "resume" not in verdict.failed:
        return
    used, saved = followed.position
    apart = resumed_apart(layout)
    if used != saved:
        yield (
            f"The checkpoint says that training has used {saved} sequences, and it has used {used}: a resumed run "
            "continues at another place in the data. Look at the loader's state_dict."
        )
    elif DATA in apart:
        yield (
            "A resumed run trains on other sequences than it would have without a stop, though the checkpoint has the "
            "right position: the loader's load_state_dict does not go there, or leaves out what it has read ahead."
        )
    elif plugins := sorted({name.split(".")[1] for name in apart if name.startswith(f"{PLUGINS}.")}):
        yield (
            f"After a resume, the last step leaves plugin {format_list(plugins)} in another state: state_dict leaves "
            "out what it needs, or load_state_dict does not put it back."
        )
    elif apart:
        yield (
            "After a resume, the last step, from the same sequences, gives other values of "
            f"{format_list(_short(apart))}: something that decides a step is not in the checkpoint, or is not put back."
        )


def _short(names: Sequence[str]) -> list[str]:
    return [name.removeprefix("model.") for name in names]
