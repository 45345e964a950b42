"""What a run would be, found without giving memory to a single tensor.

The model is composed on the meta device; optimizer and activations are measured on fake tensors, which have shapes and
dtypes but no data (torch's FakeTensorMode).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .control import Control
from .errors import describe
from .hookspecs import KINDS
from .job import Job
from .rules import Layout
from .run import Run
from .setup import Setup

if TYPE_CHECKING:
    from torch import nn

    from .compose import Composition
    from .model import Model

FLOPS_CONVENTION = "forward and backward, causal attention, a multiply-add is 2; the input embedding is a look-up"


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank."""

    parameters: int
    gradients: int
    """As many, and of the same dtype."""
    optimizer: int | None
    """After the first step; None where it could not be found."""
    activations: int | None
    """What autograd keeps of one micro-batch for its backward pass; None where it could not be found."""
    notes: tuple[str, ...] = ()
    """Why something could not be found."""

    @property
    def total(self) -> int:
        """The sum of what was found; what kernels need in passing, and the allocator's slack, come on top."""
        return self.parameters + self.gradients + (self.optimizer or 0) + (self.activations or 0)


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters, a tied one counted once."""

    total: int
    trainable: int
    by_module: Mapping[str, int]
    """By top-level module."""
    tied: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Plan:
    """A composition, and what it costs."""

    phases: list[dict[str, Any]]
    idle: tuple[str, ...]
    slots: Mapping[str, tuple[str, ...]]
    """Slot or chain → the plugins behind it."""
    meshes: Mapping[str, Mapping[str, int]]
    parameters: Parameters
    memory: Memory
    communication: list[dict[str, Any]]
    """Bytes per step; nothing on one rank."""
    flops_per_token: float | None


def plan(setup: Setup, *, world: int = 1, folder: Path = Path("runs/plan")) -> Plan:
    """Compose without allocating.

    Args:
        setup: a checked configuration and its plugins.
        world: the number of ranks.
        folder: what plugins are told the run folder is; nothing is written there.

    Raises:
        ConfigError: for a composition that can't be.
    """
    import torch

    from .compose import compose
    from .distributed import DistributedContext
    from .initialise import tied_groups
    from .world import World

    config = setup.config
    layout = Layout.of(config.parallel, world)
    dist = DistributedContext(layout, torch.device("cpu"), World(size=world))
    job = Job(config, setup.hooks, Run(folder), dist, Control(dist))
    setup.hooks.bind(job)
    composition = compose(job, allocate=False)
    model = composition.model
    parameters = _count(model, tied_groups(*model.parts))
    flops = model.flops_per_token(config.train.sequence)
    return Plan(
        phases=composition.report,
        idle=composition.idle,
        slots=_slots(setup),
        meshes=_meshes(layout),
        parameters=parameters,
        memory=_memory(job, composition),
        communication=[],
        flops_per_token=flops,
    )


def _slots(setup: Setup) -> dict[str, tuple[str, ...]]:
    filled = {hook: tuple(setup.hooks.implementers(hook)) for hook, kind in KINDS.items() if kind in ("slot", "chain")}
    return {hook: names for hook, names in filled.items() if names}


def _meshes(layout: Layout) -> dict[str, dict[str, int]]:
    dense = {axis: getattr(layout, axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    if layout.ep == 1:
        return {"dense": dense}
    efsdp = layout.dp_shard * layout.cp * layout.tp // (layout.ep * layout.etp)
    expert = {"pp": layout.pp, "dp_replicate": layout.dp_replicate, "efsdp": efsdp, "ep": layout.ep, "etp": layout.etp}
    return {"dense": dense, "expert": expert}


def _count(model: Model, tied: list[tuple[str, ...]]) -> Parameters:
    by_module: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        top = name.partition(".")[0]
        by_module[top] = by_module.get(top, 0) + parameter.numel()
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return Parameters(sum(by_module.values()), trainable, by_module, tuple(tied))


def _memory(job: Job, composition: Composition) -> Memory:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = composition.model
    held = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    notes: list[str] = []
    optimizer = activations = None
    with FakeTensorMode(allow_non_fake_inputs=True):
        for part in model.parts:
            _make_fake(part)
        try:
            optimizer = _optimizer_bytes(job, model)
        except Exception as error:  # an optimizer that reads values has no fake step
            notes.append(f"optimizer: not known before it is allocated ({describe(error)})")
        try:
            activations = _activation_bytes(job, model)
        except Exception as error:  # so has a model
            notes.append(f"activations: not known before they are allocated ({describe(error)})")
    return Memory(held, gradients, optimizer, activations, tuple(notes))


def _make_fake(part: nn.Module) -> None:
    """Give every parameter and buffer a fake tensor in place of its meta one; tied ones stay tied."""
    import torch

    made: dict[int, Any] = {}
    for module in part.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                    made[id(parameter)] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def _optimizer_bytes(job: Job, model: Model) -> int:
    """What the optimizer holds after a step."""
    import torch

    optimizer = job.hooks.optimizer(model)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.numel() * value.element_size() for value in tensors if isinstance(value, torch.Tensor))


def _activation_bytes(job: Job, model: Model) -> int:
    """What autograd saves for the backward pass of one micro-batch, the parameters themselves left out."""
    import torch

    from .protocols import Batch

    train = job.config.train
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    seen: dict[int, Any] = {}

    def look(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            seen[storage._cdata] = storage  # kept, so that its address is not given to another one
        return tensor

    def ids() -> torch.Tensor:
        return torch.zeros(train.micro_batch, train.sequence, dtype=torch.int64)

    task = job.hooks.task()
    executor = job.hooks.executor(model, task)
    model.train()
    with torch.autograd.graph.saved_tensors_hooks(look, lambda tensor: tensor):
        executor.train([Batch(ids(), ids(), ids(), ids())], 1.0)
    return sum(storage.nbytes() for storage in seen.values())
