"""FSDP2 and ZeRO-1 applied to one part of the model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from forge_train import Applied, ConfigError, Job
from forge_train.mesh.tensors import held_bytes, local
from forge_train_kit.model import dtype_borders

from ._fsdp2_step import Chunks, ShardedStep

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from forge_train.mesh.distributed import DistributedContext

Domain = Literal["dense", "expert"]
Reshard = Literal["always", "never", "step"]


def domain_mesh(dist: DistributedContext, domain: Domain) -> DeviceMesh:
    """The mesh that modules of a domain are sharded over: one axis, or replicas × shards (HSDP).

    FSDP2 averages gradients over all of it. In the dense domain these are the ranks that the engine's loss scale counts
    on; the expert domain's are fewer by a factor of `ep`, which is for the transform that spreads experts to divide by.
    """
    if domain == "expert":
        return (
            dist.mesh("expert", "dp_replicate", "efsdp")
            if dist.layout.dp_replicate > 1
            else dist.mesh("expert", "efsdp")
        )
    if dist.layout.dp_replicate > 1:
        return dist.mesh("dense", "dp_replicate", "fsdp")
    return dist.mesh("dense", "fsdp")


def replica_mesh(dist: DistributedContext, domain: Domain) -> DeviceMesh:
    """All ranks that hold the same parameters of a domain, as one axis."""
    return dist.mesh("expert", "edp") if domain == "expert" else dist.mesh("dense", "dp_cp")


@dataclass(frozen=True)
class Group:
    """Modules whose parameters are gathered and reduced together."""

    name: str
    module: nn.Module
    domain: Domain = "dense"
    head: bool = False


def groups_of(part: nn.Module, *, experts: bool = False) -> list[Group]:
    """Inner groups before those around them: experts, units, embedding and head; the part itself holds the rest.

    An embedding or a head is a group unless it shares a parameter with another module: both then belong to the part.
    Experts are groups only where they are spread over ranks (`experts`), and live on a mesh of their own.
    """
    groups: list[Group] = []
    for name in getattr(part, "units", ()):
        unit = part.get_submodule(name)
        if experts:
            groups += [Group(f"{name}.{path}", module, "expert") for path, module in expert_modules(unit)]
        groups.append(Group(name, unit))
    here = {name for name, _ in part.named_parameters(remove_duplicate=False)}
    roles: dict[str, str] = {}
    for parameter, role in getattr(part, "roles", {}).items():
        if parameter in here:  # and not on another stage of a pipeline
            roles.setdefault(parameter.rpartition(".")[0], role)
    inside = tuple(f"{group.name}." for group in groups)
    for name, role in roles.items():
        if name and not f"{name}.".startswith(inside) and not _is_tied(part, name):
            groups.append(Group(name, part.get_submodule(name), head=role == "head"))
    return groups


def expert_modules(unit: nn.Module) -> list[tuple[str, nn.Module]]:
    """The outermost modules of a unit that live in the expert domain."""
    found: list[tuple[str, nn.Module]] = []
    for path, module in unit.named_modules():
        if getattr(module, "domain", "") == "expert" and not any(path.startswith(f"{above}.") for above, _ in found):
            found.append((path, module))
    return found


def _is_tied(part: nn.Module, name: str) -> bool:
    own = {id(parameter) for parameter in part.get_submodule(name).parameters()}
    others = part.named_parameters(remove_duplicate=False)
    return any(id(parameter) in own and not other.startswith(f"{name}.") for other, parameter in others)


class Sharding:
    """One way to shard, applied to part after part.

    Args:
        job: whose precision decides in which dtype groups are gathered and gradients reduced.
        mesh_of: domain → the mesh its modules are sharded over.
        reshard: when gathered weights are dropped; see `FSDP2.Config`.
        reduce_each: whether gradients are reduced after every micro-batch instead of the last.
        offload: whether shards lie in the host's memory.
    """

    def __init__(
        self,
        job: Job,
        mesh_of: Callable[[Domain], DeviceMesh],
        *,
        reshard: Reshard = "always",
        reduce_each: bool = False,
        offload: bool = False,
    ) -> None:
        self.mesh_of, self.reshard, self.reduce_each = mesh_of, reshard, reduce_each
        self.experts = job.dist.layout.ep * job.dist.layout.etp > 1
        self.precision = job.precision
        self.offloads, self.policy = offload, CPUOffloadPolicy() if offload else OffloadPolicy()
        train = job.config.train
        self.micro_batches = job.dist.layout.micro_batches(train.global_batch, train.micro_batch)

    def apply(self, part: nn.Module) -> Applied:
        groups = self._groups(part)
        # FSDP2 (2.13) drops and reduces in the input's half of a split backward pass: what the weights' half then
        # brings would be lost without a sound. So weights stay, and gradients are reduced when all are there.
        split = bool(getattr(part, "split_backward", False))
        reshard: Reshard = "step" if split else self.reshard
        expected_bytes = self._expected_bytes(part, reshard)
        for group in groups:
            # The loss may call the head in chunks: it is gathered once, and kept until its last chunk's backward.
            self._shard(group.module, group.domain, keep=group.head or reshard != "always")
        # The part's own group stays too: what FSDP2 drops after its forward, the loss could not call any more.
        self._shard(part, "dense", keep=True)
        _check_rows(part)
        part.offloaded = self.offloads  # type: ignore[assignment]  # declared for whoever gives it memory
        assert isinstance(part, FSDPModule)
        heads = [Chunks(group.module) for group in groups if group.head and isinstance(group.module, FSDPModule)]
        step = ShardedStep(
            part, heads, drop_last_only=reshard == "step", reduce_each=self.reduce_each and not split, split=split
        )
        return Applied(
            part,
            matched=tuple(group.name for group in groups) or tuple(name for name, _ in part.named_children()),
            note=self._note(reshard),
            expected_bytes=expected_bytes,
            on_micro_batch=step.begin,
            after_backward=step.finish,
            free_gathered=step.free_gathered,
        )

    def _groups(self, part: nn.Module) -> list[Group]:
        """Modules with a `compute_dtype` of their own are groups too, since a group is gathered in one dtype."""
        groups = groups_of(part, experts=self.experts)
        known = {group.name for group in groups}
        spread = [f"{name}." for name, _ in expert_modules(part)] if self.experts else []
        for name, (own, _) in dtype_borders(part, self.precision.param).items():
            module = part.get_submodule(name)
            if _is_tied(part, name):
                raise ConfigError(
                    f"{name!r} computes in {str(own).removeprefix('torch.')} and shares a weight with another module, "
                    "which FSDP2 gathers in one dtype. Leave it as it is, or untie them."
                )
            if name not in known and any(True for _ in module.parameters()):
                groups.append(Group(name, module, "expert" if name.startswith(tuple(spread)) else "dense"))
        return groups if len(groups) == len(known) else sorted(groups, key=lambda group: -group.name.count("."))

    def _policy(self, module: nn.Module) -> MixedPrecisionPolicy:
        dtype = getattr(module, "compute_dtype", self.precision.param)
        if dtype is self.precision.master:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=self.precision.reduce)

    def _shard(self, module: nn.Module, domain: Domain, *, keep: bool) -> None:
        mesh = self.mesh_of(domain)
        fully_shard(
            module,
            mesh=mesh,
            shard_placement_fn=partial(_placement, shards=mesh.size(mesh.ndim - 1)),
            reshard_after_forward=not keep,
            mp_policy=self._policy(module),
            offload_policy=self.policy,
        )

    def _expected_bytes(self, part: nn.Module, reshard: Reshard) -> dict[str, float]:
        """A shard's rank sends all it has to the n − 1 others for each gather, and as much for each reduction; copies
        of a shard sum its gradients (arXiv:1910.02054, §7). Experts on meshes of their own are left out."""
        elsewhere = {id(p) for _, module in expert_modules(part) for p in module.parameters()} if self.experts else ()
        mine = [p for p in part.parameters() if id(p) not in elsewhere]
        dtypes = {id(p): self._policy(m).param_dtype for m in part.modules() for p in m.parameters(recurse=False)}
        gathered = 0
        for one in mine:
            own = hasattr(local(one), "fsdp_pre_all_gather")  # it decides what is gathered
            wide = (dtypes[id(one)] or self.precision.master).itemsize
            gathered += held_bytes([one]) if own else local(one).numel() * wide
        reduced = sum(local(p).numel() for p in mine if p.requires_grad) * self.precision.reduce.itemsize
        mesh = self.mesh_of("dense")
        shards = mesh.size(mesh.ndim - 1)  # torch 2.11: not -1, where the mesh has one axis
        copies = mesh.size() // shards
        gathers = {"always": 2 * self.micro_batches, "never": self.micro_batches, "step": 1}[reshard]
        reductions = self.micro_batches if self.reduce_each else 1
        *outer, inner = mesh.mesh_dim_names or ()
        whole = gathers * gathered + reductions * reduced
        found = {inner: whole * (shards - 1) / shards}
        for axis in outer:
            found[axis] = 2 * reductions * reduced / shards * (copies - 1) / copies
        return found

    def _note(self, reshard: Reshard) -> str:
        mesh = self.mesh_of("dense")
        axes = " × ".join(f"{name} {size}" for name, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
        zero = {"always": "ZeRO-3", "never": "ZeRO-2", "step": "ZeRO-1"}[reshard]
        return f"{zero} over {axes}, gathered in {str(self.precision.param).removeprefix('torch.')}"


def _placement(parameter: nn.Parameter, *, shards: int) -> Shard | None:
    """FSDP2's own choice, the first axis; the second where the first is split already and does not divide.

    torch (2.13) miscounts the rows of an uneven shard of a shard: 257 rows over tp 2 × dp_shard 4, say.
    """
    if not isinstance(parameter, DTensor) or parameter.ndim < 2:
        return None
    mesh, places = parameter.device_mesh, parameter.placements
    first, second = (
        math.prod(size for size, place in zip(mesh.shape, places, strict=True) if place == Shard(axis))
        for axis in (0, 1)
    )
    uneven = first > 1 and parameter.shape[0] % (first * shards) > 0
    return Shard(1) if uneven and parameter.shape[1] % (second * shards) == 0 else None


def _check_rows(part: nn.Module) -> None:
    """Raises ConfigError where FSDP2 holds other rows than torch counts, and columns do not divide either."""
    for name, parameter in part.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        mesh, size = parameter.device_mesh, " × ".join(map(str, parameter.shape))
        shape, _ = compute_local_shape_and_global_offset(parameter.shape, mesh, parameter.placements)
        if math.prod(shape) != local(parameter).numel():
            axes = " × ".join(
                f"{axis} {count}" for axis, count in zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)
            )
            raise ConfigError(
                f"fsdp2 can't shard {name!r} ({size}) over {axes}: neither its rows nor its columns divide. Choose "
                "another parallel.dp_shard, or pad the first size to a multiple of all these ranks."
            )
