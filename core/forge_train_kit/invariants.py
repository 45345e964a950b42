"""Checks of a model as it is built, of what transforms did to it, and of what an optimizer updates and keeps."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from forge_train.base.errors import ConfigError, PluginError
from forge_train.base.format import format_list
from forge_train.contract.model import Model
from forge_train.contract.transform import Applied
from forge_train.mesh.axes import EXPERT
from forge_train.mesh.distributed import DistributedContext
from forge_train.mesh.layout import Layout
from forge_train.plugin.calls import without
from forge_train.plugin.job import Job
from forge_train.store.placement import is_sharded, leaves, parameter_of

from .modules import HOOK_TABLES


@dataclass
class Snapshot:
    """Properties of the model that a transform must preserve."""

    shapes: dict[str, torch.Size]  # over all ranks, if it is a DTensor
    hooks: list[tuple[str, str, Any]]
    """Module path, table, hook."""

    @classmethod
    def of(cls, parts: Sequence[nn.Module]) -> Snapshot:
        return cls(
            {name: one.shape for part in parts for name, one in part.named_parameters(remove_duplicate=False)},
            [
                (path, table, hook)
                for part in parts
                for path, module in part.named_modules()
                for table in HOOK_TABLES
                for hook in getattr(module, table, {}).values()
                if callable(hook)
            ],
        )


def check_transformed(
    job: Job,
    plugin: str,
    who: str,
    before: Snapshot,
    parts: Sequence[nn.Module],
    done: Sequence[Applied],
    retie: Callable[[], None],
    *,
    frozen: bool,
) -> None:
    """Check that a transform matched something, and kept names, shapes, hooks and ties."""
    counts = job.dist.gather_objects(sum(len(one.matched) for one in done))
    # Where nothing is trained, `ddp` has no gradients to average.
    if not any(counts) and not frozen and job.dist.complete:
        raise ConfigError(
            f"{who} matched nothing in this model; {without([job.hooks.enabled[plugin]])}, or mend its filter."
        )
    after = Snapshot.of(parts)
    if twice := _in_several(parts):
        raise PluginError(f"{who} left parameters in several parts{_some('twice', twice)}; each part has its own.")
    added = {name for one in done for name in one.added}
    wanted, names = job.dist.gather_names({*before.shapes} | added), job.dist.gather_names({*after.shapes})
    if names != wanted and job.dist.complete:
        lost, new = sorted(wanted - names), sorted(names - wanted)
        raise PluginError(
            f"{who} changed parameter names{_some('lost', lost)}{_some('new', new)}. Act on the module itself instead "
            "of wrapping it, and name new parameters in Applied.added."
        )
    kept = {(path, table, id(hook)) for path, table, hook in after.hooks}
    for path, table, hook in before.hooks:
        if (path, table, id(hook)) not in kept and _is_here(path, parts, job.dist.layout.stages):
            way = "replace modules with forge_train_kit.modules.swap"
            raise PluginError(f"{who} lost a hook of module {path!r} ({table}); {way}.")
    check_added(who, job.dist.layout, parts, added)
    retie()
    if cut := sorted(name for name, shape in after.shapes.items() if before.shapes.get(name, shape) != shape):
        wants = "A part of one must be a DTensor, or a checkpoint would hold one rank's part as if it were the whole."
        raise PluginError(f"{who} changed the shape of parameters{_some('cut', cut)}. {wants}")


def _is_here(path: str, parts: Sequence[nn.Module], stages: int) -> bool:
    """Return True if a module is on this rank; under pipelining, others are on other ranks."""
    return len(parts) == stages == 1 or any(path in dict(part.named_modules()) for part in parts)


def _in_several(parts: Sequence[nn.Module]) -> list[str]:
    """Parameters that would be trained in one part and in another; tied ones are judged by `_check_ties`."""
    homes: dict[str, set[int]] = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            homes.setdefault(name, set()).add(id(parameter))
    return sorted(name for name, parameters in homes.items() if len(parameters) > 1)


def check_added(who: str, layout: Layout, parts: Iterable[nn.Module], added: Collection[str]) -> None:
    """Check that parameters added to experts are sharded as the experts are.

    Raises:
        ConfigError: if one is not: no one would sum its gradients over ep, and a checkpoint would hold one rank's.
    """
    spread = " × ".join(f"parallel.{axis} = {size}" for axis, size in layout.dividing("experts").items())
    if not spread or not added:
        return
    for part in parts:
        inside = tuple(f"{path}." for path, one in part.named_modules() if getattr(one, "domain", "") == EXPERT)
        for name, parameter in part.named_parameters():
            if name in added and name.startswith(inside) and not hasattr(parameter, "placements"):
                raise ConfigError(
                    f"{who} adds {name!r} to experts, which {spread} spreads over ranks, and does not "
                    "split it; do as with their weights: distribute_tensor(…, weight.device_mesh, weight.placements)."
                )


def _some(label: str, names: list[str]) -> str:
    return f"; {label}: {format_list(names)}" if names else ""


def check_optimizer(job: Job, model: Model, optimizer: torch.optim.Optimizer) -> None:
    """Check that the optimizer updates exactly the trainable parameters."""
    given = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained = {name: id(parameter) for name, parameter in model.named_parameters() if parameter.requires_grad}
    if lost := [name for name, number in trained.items() if number not in given]:
        raise PluginError(
            f"{job.hooks.whose('optimizer')}: {len(lost)} of {len(trained)} trainable parameters are in no group "
            f"({format_list(lost)}). Add them, or freeze them with requires_grad_(False)."
        )
    if given - {id(parameter) for parameter in model.parameters()}:
        raise PluginError(
            f"{job.hooks.whose('optimizer')}: it holds parameters that are not the model's. "
            "Take them from model.named_parameters()."
        )


def check_alike(state: Mapping[str, Any], model: Model, dist: DistributedContext) -> None:
    """Check that all ranks of a stage have the same state, except for shards: only the first rank's copy is saved.

    Args:
        state: as returned by `optimizer_state`.
        model: the model whose parameters it belongs to.
        dist: the processes; all ranks call this.

    Raises:
        PluginError: on every rank, naming what differs.
    """
    if dist.world == 1:
        return
    parameters = dict(model.named_parameters())
    lines = {name: _words(name, leaf, parameters) for name, leaf in leaves(state, "optimizer")}
    together = hashlib.sha256(repr(sorted(lines.items())).encode()).hexdigest()
    size = dist.world // dist.layout.stages
    first = dist.gather_objects(together)
    if all(mark == first[rank - rank % size] for rank, mark in enumerate(first)):
        return
    everybody = dist.gather_objects(lines)
    stages = [everybody[start : start + size] for start in range(0, dist.world, size)]
    name = min(name for ranks in stages for one in ranks for name in one if len({o.get(name) for o in ranks}) > 1)
    raise PluginError(
        f"The optimizer's state {name!r} can't be saved: it differs from rank to rank, and is no shard of a DTensor. "
        "Make it of the parameter (torch.zeros_like), or the same on every rank."
    )


def _words(name: str, leaf: Any, parameters: Mapping[str, Tensor]) -> str:
    """A leaf, as far as ranks have to have it alike."""
    if not isinstance(leaf, Tensor):
        return repr(leaf)
    what = f"{tuple(leaf.shape)} {leaf.dtype}"
    if is_sharded(leaf):
        return f"{what} sharded"
    parameter = parameter_of(name, parameters)
    if parameter is not None and not is_sharded(parameter) and parameter.shape == leaf.shape:
        return what  # replicated as its parameter is
    content = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{what} {hashlib.sha256(content).hexdigest()}"


@contextmanager
def addressable(sections: Mapping[str, Any]) -> Iterator[None]:
    """Refuse a tensor whose size in bytes no integer of torch can hold, and name the largest value that may cause it.

    Raises:
        ConfigError: for such a tensor made in the block.
    """
    try:
        yield
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        values = [(value, key) for name, one in sections.items() for key, value in _integers(name, one)]
        value, key = max(values, default=(0, ""))
        cause = f"{key}: {value:,} is too large" if key else "A size of the model is too large"
        raise ConfigError(
            f"{cause}: a tensor of the model would have more bytes than a machine can address "
            f"({str(error).splitlines()[0]}). Set a smaller one."
        ) from None


def _integers(name: str, section: Any) -> Iterator[tuple[str, int]]:
    if dataclasses.is_dataclass(section):
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            if isinstance(value, int) and not isinstance(value, bool):
                yield f"{name}.{field.name}", value
