"""Parameter groups of an optimizer: which parameters decay, and what a user's patterns change."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch

from forge_train.base.errors import ConfigError, nearest
from forge_train.base.format import format_list

if TYPE_CHECKING:
    from torch import Tensor, nn

    from forge_train.contract.model import Model
    from forge_train.plugin.job import Job

    from ..sections import ParameterGroup

Settings = Callable[[str, "nn.Parameter"], Mapping[str, Any]]
"""Global name and parameter → its settings (`lr`, `weight_decay`, …), all of them hashable."""
Key = tuple[int, tuple[tuple[str, Any], ...], Any]
"""Index of a pattern or −1, settings, and a mesh's axes and sizes: the same on all stages of a pipeline."""


def parameter_groups(
    model: Model, job: Job, settings: Settings, groups: Sequence[ParameterGroup] = ()
) -> list[dict[str, Any]]:
    """Put every trainable parameter into exactly one group. Parameters with the same settings share one.

    A group holds parameters of only one device mesh, because torch (2.13) rejects fused and foreach updates over
    several meshes, or over a mix of DTensors and plain tensors. All stages of a pipeline have the same groups, some
    of them empty.

    Args:
        model: the composed model.
        job: its run. All processes call this.
        settings: those of each parameter; they include `lr` and `weight_decay` if there are `groups`.
        groups: the user's patterns. A tied parameter has several names, and each of them may match. An optimizer group
            carries its pattern as `match` and its factor as `lr_factor`, which `forge plan` shows.

    Raises:
        ConfigError: for a pattern that matches or changes nothing, and for a parameter that two patterns match.
    """
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    indices = _indices(model, job, trained, groups) if groups else {}
    factors = lr_factors(model)
    members: dict[Key, list[nn.Parameter]] = {}
    for name, parameter in trained:
        own, index = dict(settings(name, parameter)), indices.get(name, -1)
        if (factor := factors.get(name, 1.0)) != 1:
            own["lr"] *= factor
        if index >= 0:
            group = groups[index]
            own["lr"] *= group.lr
            own["weight_decay"] = own["weight_decay"] if group.weight_decay is None else group.weight_decay
        members.setdefault((index, tuple(own.items()), _mesh(parameter)), []).append(parameter)
    keys = dict.fromkeys(itertools.chain(*job.dist.gather_stages(list(members))))
    made = []
    for key in sorted(keys, key=lambda key: key[0]):
        index, own_items, _ = key
        pattern = {"match": groups[index].match, "lr_factor": groups[index].lr} if index >= 0 else {}
        made.append({"params": members.get(key, []), **dict(own_items), **pattern})
    return made


def lr_factors(model: Model) -> dict[str, float]:
    """Parameter → factor on its learning rate, where its module declares one: `lr_factors = {"weight": 2.0}`."""
    return {
        f"{path}.{name}" if path else name: factor
        for path, module in model.named_modules()
        for name, factor in getattr(module, "lr_factors", {}).items()
    }


def decay_groups(model: Model, job: Job, config: Any) -> list[dict[str, Any]]:
    """Parameter groups in which matrices decay, while vectors and, unless asked, embeddings do not; see `decays` and
    `parameter_groups`.

    Args:
        model: the composed model.
        job: its run. All processes call this.
        config: the optimizer's section, with `lr`, `weight_decay` and, where they are options, `groups` and
            `decay_embeddings`.
    """
    embeddings = getattr(config, "decay_embeddings", False)

    def settings(name: str, parameter: Tensor) -> Mapping[str, float]:
        decaying = decays(model, name, parameter, embeddings=embeddings)
        return {"lr": config.lr, "weight_decay": config.weight_decay if decaying else 0.0}

    return parameter_groups(model, job, settings, getattr(config, "groups", ()))


def decays(model: Model, name: str, parameter: Tensor, *, embeddings: bool) -> bool:
    """Return True if weight decay makes sense for a parameter: for matrices, not for vectors (norms, biases, and the
    stacked biases of experts), and for embeddings if requested."""
    return parameter.ndim > 1 and not name.endswith("bias") and (embeddings or model.roles.get(name) != "embedding")


def _indices(
    model: Model, job: Job, trained: Sequence[tuple[str, nn.Parameter]], groups: Sequence[ParameterGroup]
) -> dict[str, int]:
    """Parameter → the only pattern that matches it, if any."""
    key = f"{job.hooks.provider('optimizer')}.groups"
    names = _names(model)
    hits: dict[str, list[int]] = {}
    for name, parameter in trained:
        own = names.get(id(parameter), {name})
        hits[name] = [i for i, group in enumerate(groups) if any(fnmatchcase(one, group.match) for one in own)]
        if len(hits[name]) > 1:
            patterns = " and ".join(repr(groups[index].match) for index in hits[name])
            raise ConfigError(f"{key}: {patterns} both match {name!r}. Each parameter belongs to one group.", key=key)
    stages = job.dist.gather_stages((sorted({index for found in hits.values() for index in found}), list(hits)))
    used = {index for indices, _ in stages for index in indices}
    everybody = [name for _, found in stages for name in found]
    for index, group in enumerate(groups):
        if index not in used and job.dist.complete:
            hint = nearest(group.match, everybody) or f" There are {format_list(everybody)}."
            raise ConfigError(f"{key}: {group.match!r} matches no trainable parameter.{hint}", key=key)
        if group.lr == 1 and group.weight_decay is None:
            raise ConfigError(f"{key}: {group.match!r} changes nothing; set its lr or its weight_decay.", key=key)
    return {name: found[0] for name, found in hits.items() if found}


def _names(model: Model) -> dict[int, set[str]]:
    """All names of each parameter, by its id: a tied one has several."""
    found: dict[int, set[str]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            found.setdefault(id(parameter), set()).add(f"{prefix}.{name}" if prefix else name)
    return found


def _mesh(parameter: Any) -> Any:
    mesh: Any = getattr(parameter, "device_mesh", None)
    return (mesh.mesh_dim_names, tuple(mesh.shape)) if hasattr(mesh, "mesh_dim_names") else mesh


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors of an optimizer's state, counts of steps among them."""
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
