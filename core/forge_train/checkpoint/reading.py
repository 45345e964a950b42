"""Content of a checkpoint: `state.json`, the shapes of its tensors, and the tensors.

All of it is untrusted: its size and its shape are checked before anything is built from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base.errors import ConfigError
from ..base.files import load_json
from ..base.strict_json import COUNT, PAIRS, odd
from ..mesh.distributed import DistributedContext
from ..store import tensors
from ..store.index import read_index
from ..store.manifest import EDITABLE, FORMAT, LARGEST, STATE, other_format, way_out
from ..store.placement import place
from ..store.tree import TENSOR, TUPLE, has_odd_tuple, join, named, naming_problem, without

_SHAPE = {
    **dict.fromkeys(("config?", "models?", "plugins?", "providers?", "optimizer?", "imported?"), dict),
    "step?": COUNT,
    "progress?": {"*": COUNT},
    "left_out?": PAIRS,
    "enabled?": [{"name": str, "version": str}],
    "odd?": {"*": [str]},
    "evaluation?": ({"*": float}, type(None)),
    "base?": ({"path": str, "digest": str}, type(None)),
}
"""Entry of `state.json` → what it is. A checkpoint of weights alone lacks some."""
_FACTORS = 100
"""Most terms that `evaluation` may have."""


def unusable(path: Path, problem: str) -> ConfigError:
    """A checkpoint that can't be used, and what to do about it."""
    if other := way_out(problem, path):
        return ConfigError(f"{path}: {problem}. {other}")
    return ConfigError(f"{path}: not a whole checkpoint: {problem}. {_way_out(path)}")


def _way_out(path: Path) -> str:
    if (path.parent.parent / "plugins.json").is_file():
        return f"Name the run instead, which takes its newest whole one: {path.parent.parent}"
    return f"Put the file back as it was (only {EDITABLE} may be edited), or make the checkpoint again."


def read_state(path: Path) -> dict[str, Any]:
    """A checkpoint's `state.json`, with its tensors still only named.

    Raises:
        ConfigError: if it was written in a format this forge does not know, or is not as a checkpoint's.
    """
    try:
        state = load_json(path / STATE, most=LARGEST[STATE])
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error).partition("\n")[0][:200]
        raise ConfigError(f"{path}: not a checkpoint of forge: {STATE} can't be read: {reason}.") from error
    if not isinstance(state, dict):
        raise ConfigError(f"{path}: not a checkpoint of forge: {STATE} is no table.")
    found = state.get("format")
    if problem := other_format(found):
        raise unusable(path, problem)
    if found != FORMAT:
        raise ConfigError(f"{path}: checkpoint format {str(found)[:20]!r}; this forge reads {FORMAT}.")
    if problem := state_problem(state):
        raise ConfigError(f"{path}: {STATE} is not as forge writes it: {problem}.")
    return state


def state_problem(state: Mapping[str, Any]) -> str:
    """Describe what a `state.json` holds that no checkpoint does, in a phrase; empty if there is nothing."""
    if problem := odd(state, _SHAPE):
        return problem
    if len(state.get("evaluation") or ()) > _FACTORS:
        return f"'evaluation' holds more than {_FACTORS} factors"
    if has_odd_tuple(state) or state.keys() & {TENSOR, TUPLE}:
        return f"{TENSOR!r} or {TUPLE!r} is where none can be"
    return ""


def shapes(path: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name → global shape and dtype of every tensor in a checkpoint."""
    return {name: (entry.shape, entry.dtype) for name, entry in read_index(path).items()}


def load(
    path: Path,
    like: Mapping[str, Tensor],
    dist: DistributedContext,
    *,
    only: str = "",
    elsewhere: Set[str] = frozenset(),
) -> dict[str, Any]:
    """Read a checkpoint's state.

    Args:
        path: a whole checkpoint.
        like: name → tensor to fill in place (this rank's shard, if it is one). Others are made here; those of the
            optimizer are spread as the parameter they belong to.
        dist: who reads.
        only: read tensors whose name begins with this.
        elsewhere: parameters and buffers on other stages of a pipeline; what is under their names is left out.
    """
    here = _named(path, state := without(read_state(path), elsewhere))
    parameters = {name.removeprefix("model."): tensor for name, tensor in like.items() if name.startswith("model.")}
    odd = {kind: set(state.get("odd", {}).get(kind, ())) for kind in ("plain", "spread")}
    targets = {
        name: like[name] if name in like else place(name, shape, dtype, parameters, odd)
        for name, (shape, dtype) in shapes(path).items()
        if name in here and name.startswith(only)
    }
    tensors.read(path, targets, dist)
    return {key: join(value, targets) for key, value in state.items()} if not only else {"tensors": targets}


def _named(path: Path, state: Any) -> set[str]:
    """The names of tensors in a state, each of which the index must have."""
    if problem := naming_problem(state, shapes(path)):
        raise ConfigError(f"{path}: {STATE} {problem}.")
    return {name for name, _ in named(state)}
