"""The transform: a plan, realised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from forge_train import Applied, ConfigError
from forge_train_kit.specialisation import Specialisation

from . import expected_bytes, plan
from .collectives import Group
from .layers import Region, Styles
from .replicas import Replicas, added_parameter, whole_parameters


def apply(
    part: nn.Module,
    mesh: DeviceMesh,
    *,
    sequence_parallel: bool,
    loss_parallel: bool,
    experts_apart: bool,
    size: int,
    owner: Callable[[nn.Module], str] = lambda module: "",
) -> Applied:
    """Split a part over the ranks of a mesh, as its plan says.

    Args:
        part: a model's.
        mesh: of one axis.
        sequence_parallel: see `TensorParallel.Config`.
        loss_parallel: see there.
        experts_apart: True if another transform distributes experts over ranks and finishes their gradients.
        size: bytes that one feature of all tokens of a step takes.
        owner: the plugin that a module comes from, for messages.

    Raises:
        ConfigError: for a plan that does not fit the model, or the number of ranks.
    """
    entries = plan.read(part, mesh.size(), owner)
    region = Region(mesh, Group.of(mesh), sequence_parallel, loss_parallel)
    part.register_forward_pre_hook(partial(_enter, region), with_kwargs=True)
    if sequence_parallel and hasattr(part, "hidden_shape"):
        Specialisation(partial(_pieces, mesh.size()))(part)
    made: dict[int, nn.Parameter] = {}
    styles = Styles(region)
    for entry in entries:
        styles.realise(entry.module, entry.style, made)
    if any(entry.style == "logits" for entry in entries):
        part.register_forward_hook(lambda _, __, hidden: region.gather(hidden))
    elif getattr(part, "head", None) is not None:
        part.register_forward_hook(lambda _, __, hidden: region.agreed(hidden))
    how = {"sequence_parallel": sequence_parallel, "experts_apart": experts_apart}
    wholes = whole_parameters(part, entries, **how)
    replicas = Replicas(part, wholes, mesh, lambda name: added_parameter(part, entries, name, **how))
    return Applied(
        part,
        tuple(entry.name for entry in entries),
        _note(entries, wholes, region),
        expected_bytes={"tp": expected_bytes.sent(part, entries, wholes, ranks=mesh.size(), size=size)},
        on_micro_batch=replicas.look_up,
        after_backward=replicas.reduce,
    )


def _enter(region: Region, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if args:
        region.enter(args[0], kwargs.get("position_ids"))


def _pieces(ranks: int, own: Any) -> Mapping[str, Any]:
    """Declare that the part outputs a piece of each sequence."""

    def hidden_shape(self: Any, batch: int, sequence: int) -> tuple[int, ...]:
        first, whole, *rest = own.hidden_shape(self, batch, sequence)
        return (first, -(-whole // ranks), *rest)

    return {"hidden_shape": hidden_shape}


def _note(entries: list[plan.Entry], wholes: list[Any], region: Region) -> str:
    styles = Counter(entry.style for entry in entries)
    counts = ", ".join(f"{styles[style]} {style}" for style in plan.STYLES if styles[style])
    parallel = " and ".join(
        name for name, on in (("sequence", region.sequence_parallel), ("loss", region.loss_parallel)) if on
    )
    silent = sum(not whole.planned for whole in wholes)
    more = f"; {silent} parameters that the plan does not name are whole" if silent else ""
    return f"{region.group.size} ranks: {counts}{f'; {parallel} parallel' if parallel else ''}{more}"


def enable_async(device: torch.device, mesh: DeviceMesh) -> None:
    """Have torch.compile overlap collectives with matrix products, through symmetric memory.

    Raises:
        ConfigError: where that can't be.
    """
    if device.type != "cuda":
        raise ConfigError(f"tp.async_tp needs CUDA devices with symmetric memory; this is {device.type!r}.")
    try:
        import torch._inductor.config as inductor
        from torch.distributed import _symmetric_memory
    except ImportError as error:
        raise ConfigError(f"tp.async_tp: torch {torch.__version__} has no symmetric memory ({error}).") from error
    inductor._micro_pipeline_tp = True
    enable = getattr(_symmetric_memory, "enable_symm_mem_for_group", None)
    if enable is not None:
        enable(mesh.get_group().group_name)
