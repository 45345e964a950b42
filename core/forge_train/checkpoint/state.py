"""The state of optimizers, schedules and random number generators, as a checkpoint holds it."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..base.errors import PluginError
from ..contract.model import Model
from ..store.tree import TENSOR

if TYPE_CHECKING:
    from ..mesh.distributed import DistributedContext


def merged_groups(stages: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The optimizer's groups over the stages of a pipeline: the same everywhere, but for their parameters.

    Raises:
        PluginError: for stages whose groups do not fit each other.
    """
    if len({len(groups) for groups in stages}) > 1:
        raise PluginError(
            f"The optimizer has {', '.join(str(len(groups)) for groups in stages)} parameter groups on the stages of "
            "the pipeline. Give every stage the same groups; one without parameters may be empty."
        )
    return [
        {**same[0], "params": [name for group in same for name in group["params"]]}
        for same in zip(*stages, strict=True)
    ]


def optimizer_state(optimizer: torch.optim.Optimizer, model: Model) -> dict[str, Any]:
    """The optimizer's `state_dict` with parameters named instead of numbered."""
    state = optimizer.state_dict()
    names = _names(optimizer, model)
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    by_number: dict[Any, str] = dict(zip(numbers, names, strict=True))
    return {
        **{key: value for key, value in state.items() if key not in ("state", "param_groups")},
        # What is no parameter's, an optimizer may keep under a name of its own.
        "state": {by_number.get(key, key): values for key, values in state["state"].items()},
        "param_groups": [{**g, "params": [by_number[n] for n in g["params"]]} for g in state["param_groups"]],
    }


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, model: Model, saved: Mapping[str, Any], *, keep_settings: bool = False
) -> None:
    """Give an optimizer the state that `optimizer_state` took.

    Args:
        optimizer: a fresh one.
        model: whose parameters it holds.
        saved: the named state.
        keep_settings: keep the fresh optimizer's learning rate, decay, …, because they were changed on purpose.
    """
    names = _names(optimizer, model)
    numbers = {name: number for number, name in enumerate(names)}
    groups = []
    old = {name: group for group in saved["param_groups"] for name in group["params"]}
    for group in optimizer.state_dict()["param_groups"]:
        members = [names[number] for number in group["params"]]
        settings = group if keep_settings or not members else old[members[0]]
        here = {key: group[key] for key in ("params", "param_names") if key in group}
        groups.append({**{key: _as_here(value, group.get(key)) for key, value in settings.items()}, **here})
    state = {numbers.get(name, name): _copied(values) for name, values in saved["state"].items()}
    rest = {key: value for key, value in saved.items() if key not in ("state", "param_groups")}
    optimizer.load_state_dict({**rest, "state": state, "param_groups": groups})
    parameters = dict(model.named_parameters())
    for name, values in saved["state"].items():
        held = optimizer.state[parameters.get(name, name)]
        if isinstance(held, dict) and isinstance(values, Mapping):
            held.update({key: _exact(held[key], value) for key, value in values.items() if key in held})


def _as_here(value: Any, fresh: Any) -> Any:
    """A setting on the device of the fresh one, if both are tensors."""
    return value.to(fresh.device) if isinstance(value, Tensor) and isinstance(fresh, Tensor) else value


def _copied(values: Any) -> Any:
    return dict(values) if isinstance(values, Mapping) else values


def _exact(held: Any, saved: Any) -> Any:
    """Restore values exactly as saved: torch casts tensors to the parameter's dtype, and takes a text for a list."""
    if isinstance(saved, Tensor):
        if not isinstance(held, Tensor):
            return held
        return held if held.dtype == saved.dtype else saved.to(held.device)
    if isinstance(saved, Mapping) and isinstance(held, Mapping):
        return {**held, **{key: _exact(held[key], value) for key, value in saved.items() if key in held}}
    if isinstance(saved, (list, tuple)) and isinstance(held, (list, tuple)) and len(held) == len(saved):
        return type(saved)(_exact(one, other) for one, other in zip(held, saved, strict=True))
    return saved


def by_group(
    schedule: Mapping[str, Any], saved: Mapping[str, Any], optimizer: torch.optim.Optimizer, model: Model
) -> dict[str, Any]:
    """A schedule's saved state for this optimizer's parameter groups: its lists of one value per group (torch's
    `base_lrs`) are rearranged. A group holds one mesh's parameters, so that another layout may have more or fewer.

    Args:
        schedule: its saved state.
        saved: the optimizer's, as `optimizer_state` took it.
        optimizer: the one here.
        model: whose parameters it holds.
    """
    old = saved["param_groups"]
    home = {name: index for index, group in enumerate(old) for name in group["params"]}
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    first = [next((known[id(p)] for p in group["params"]), None) for group in optimizer.param_groups]
    places = [0 if name is None else home[name] for name in first]
    return {
        key: [value[place] for place in places] if isinstance(value, list) and len(value) == len(old) else value
        for key, value in schedule.items()
    }


def keep_rates(optimizer: torch.optim.Optimizer, schedule: Any, saved: Mapping[str, Any]) -> None:
    """Have a resumed schedule continue from its place with the learning rates of this optimizer, not with those that it
    was saved with (torch's schedules keep them as `base_lrs`)."""
    old, groups = saved["param_groups"][0], optimizer.param_groups
    if hasattr(schedule, "base_lrs") and "initial_lr" in old:
        schedule.base_lrs = [group["initial_lr"] for group in groups]
        for group in groups:
            group["lr"] = group["initial_lr"] * old["lr"] / old["initial_lr"]


def follow_new_curve(schedule: Any) -> None:
    """Have a resumed schedule whose curve is another one now begin on it, and not with the rate that was saved. torch's
    other schedules than `LambdaLR` know no curve, but only steps from one rate to the next."""
    if isinstance(schedule, torch.optim.lr_scheduler.LambdaLR):
        shares = [curve(schedule.last_epoch) for curve in schedule.lr_lambdas]
        rates = [base * share for base, share in zip(schedule.base_lrs, shares, strict=True)]
        for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        schedule._last_lr = rates


def _names(optimizer: torch.optim.Optimizer, model: Model) -> list[str]:
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    names = [known.get(id(p), "") for group in optimizer.param_groups for p in group["params"]]
    if not all(names) or len(set(names)) < len(names):
        raise PluginError("The optimizer holds a parameter twice, or one that is not the model's.")
    return names


def random_state() -> dict[str, Any]:
    """The state of every random number generator a plugin may draw from."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, position, has_gauss, gauss = numpy.random.get_state()
        state["numpy"] = [kind, [int(key) for key in keys], position, has_gauss, gauss]
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put the generators back where `random_state` found them."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
    if "numpy" in state:
        import numpy as np

        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))


def all_random_states(dist: DistributedContext) -> Tensor:
    """The state of every rank's generators, `[world, bytes]`; each rank holds its own row."""
    packed = torch.frombuffer(bytearray(json.dumps(random_state(), default=_packed).encode()), dtype=torch.uint8)
    length = torch.tensor(packed.numel())
    dist.all_reduce(length, "max")
    row = torch.zeros(1, int(length), dtype=torch.uint8)
    row[0, : packed.numel()] = packed
    return rows(row, dist)


def random_states_like(shape: tuple[int, ...], dist: DistributedContext) -> Tensor:
    """Return a buffer for the saved states: this rank's row if the number of ranks is the same, else all rows."""
    return (
        rows(torch.empty(1, *shape[1:], dtype=torch.uint8), dist)
        if shape[0] == dist.world
        else torch.empty(shape, dtype=torch.uint8)
    )


def set_random_state_from(states: Tensor, dist: DistributedContext, seed: int, step: int) -> None:
    """Put the generators back where they were saved, on a rank that there was; another one gets new ones, which repeat
    nothing that was drawn before."""
    local = getattr(states, "to_local", lambda: states)().cpu()
    row = 0 if local.shape[0] == 1 and states.shape[0] == dist.world else dist.rank
    if row < local.shape[0]:
        text = local[row].numpy().tobytes().rstrip(b"\0").decode()
        set_random_state(json.loads(text, object_hook=_unpacked))
    else:
        digest = hashlib.blake2b(f"{seed}/{step}/{dist.rank}".encode(), digest_size=4).digest()
        seed_everything(int.from_bytes(digest, "little"), 0)


def rows(row: Tensor, dist: DistributedContext) -> Tensor:
    """Join a row of each rank to a DTensor `[world, n]`."""
    if dist.world == 1:
        return row
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(row.to(dist.device), dist.mesh("flat"), [Shard(0)], run_check=False)


def _packed(value: object) -> dict[str, str]:
    assert isinstance(value, Tensor)
    return {TENSOR: base64.b64encode(value.cpu().numpy().tobytes()).decode()}


def _unpacked(value: dict[str, Any]) -> Any:
    if value.keys() != {TENSOR}:
        return value
    return torch.frombuffer(bytearray(base64.b64decode(value[TENSOR])), dtype=torch.uint8)


def seed_everything(seed: int, rank: int) -> None:
    """Seed the global generators; ranks differ, since their noise should."""
    random.seed(seed + rank)
    torch.manual_seed(seed + rank)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed((seed + rank) % 2**32)
