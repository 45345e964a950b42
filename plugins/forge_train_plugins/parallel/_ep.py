"""Expert parallelism applied to one part of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from forge_train import Applied, ConfigError, MicroBatch, PluginError
from forge_train.mesh.tensors import local

if TYPE_CHECKING:
    from forge_train.mesh.distributed import DistributedContext


def spread(part: nn.Module, dist: DistributedContext) -> Applied:
    """Shard the parameters of every module of the expert domain.

    Raises:
        ConfigError: for a model without experts, or with a number that does not divide.
    """
    layout = dist.layout
    found = [(name, module) for name, module in part.named_modules() if getattr(module, "domain", "") == "expert"]
    if not found and layout.pp > 1:
        return Applied(part)  # another part may have some; core tells where none has
    if not found:
        raise ConfigError(
            f"parallel.ep = {layout.ep}: the model has no experts to spread; enable a plugin that builds them, such as "
            "moe, or set parallel.ep = 1."
        )
    axes = [axis for axis in ("ep", "etp") if getattr(layout, axis) > 1]
    mesh = dist.mesh("expert", *axes)
    for name, module in found:
        for key, (experts, inner) in _plan(name, module).items():
            where = {"ep": experts, "etp": inner}
            module._parameters[key] = _shard(module._parameters[key], mesh, axes, where, f"{name}.{key}")
    # A rank's gradients come from the tokens of all ranks of its ep group. FSDP2 averages them over dp_replicate ×
    # efsdp ranks, and the engine's scale counts on dp_replicate × dp_shard × cp, as it averages dense parameters.
    average = layout.dp_replicate * layout.efsdp / layout.shard_average_size
    finish = _Finish([module for _, module in found], average)
    names = tuple(name for name, _ in found)
    sizes = " × ".join(f"{axis} {getattr(layout, axis)}" for axis in axes)
    return Applied(
        part,
        names,
        f"experts over {sizes}",
        on_micro_batch=finish.look_up,
        after_backward=finish.scale,
    )


def _plan(name: str, module: nn.Module) -> dict[str, tuple[int, int]]:
    declared = getattr(module, "expert_plan", None)
    if declared is None:
        raise PluginError(
            f"ep: {name!r} ({type(module).__name__}) has the domain 'expert' but no expert_plan() that says which axis "
            "of each parameter counts the experts, and which is split within one."
        )
    plan: dict[str, tuple[int, int]] = declared()
    own = {key for key, value in module._parameters.items() if value is not None}
    if own != plan.keys():
        raise PluginError(f"ep: the expert_plan() of {name!r} names {sorted(plan)}; its parameters are {sorted(own)}.")
    return plan


def _shard(parameter: Any, mesh: Any, axes: list[str], where: dict[str, int], name: str) -> nn.Parameter:
    local, places = parameter.detach(), []
    for axis in axes:
        dim, size, rank = where[axis], mesh[axis].size() if len(axes) > 1 else mesh.size(), mesh.get_local_rank(axis)
        if parameter.shape[dim] % size:
            what = "experts" if axis == "ep" else "features of an expert"
            raise ConfigError(f"parallel.{axis} = {size} does not divide the {parameter.shape[dim]} {what} of {name}.")
        each = local.shape[dim] // size
        local = local.narrow(dim, rank * each, each)
        places.append(Shard(dim))
    sharded = DTensor.from_local(
        local.clone(), mesh, places, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(sharded, requires_grad=parameter.requires_grad)


class _Finish:
    """Scales the gradients of experts, once a step.

    FSDP2's own divide factor can't do it: on a mesh of size 1 it divides twice (torch 2.13).
    """

    def __init__(self, modules: list[nn.Module], factor: float) -> None:
        self.modules, self.factor = modules, factor
        self._parameters: list[nn.Parameter] = []

    def look_up(self, micro: MicroBatch | None = None) -> None:
        """Before the first forward: later on a SHARD transform may show other parameters than the optimizer has."""
        if not self._parameters:
            self._parameters = [parameter for module in self.modules for parameter in module.parameters()]

    def scale(self) -> None:
        gradients = [local(parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        if gradients and self.factor != 1.0:
            torch._foreach_mul_(gradients, self.factor)
