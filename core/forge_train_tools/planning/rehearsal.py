"""One optimizer step of one rank on fake tensors: what it would keep, send and compute."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from forge_train.compose.initialise import retie, tied_groups
from forge_train.contract.batch import Batch, MicroBatch
from forge_train.contract.model import Model
from forge_train.contract.protocols import Loader
from forge_train.loop.assembly import build_stepper
from forge_train.mesh.tensors import held_bytes, local
from forge_train.plugin import hookspecs
from forge_train.plugin.job import Job
from forge_train.step.step import Watcher
from forge_train_kit.optim import state_of

from .apart import Apart
from .communication import Collective, Collectives
from .examples import example_of
from .fewer import passes_of
from .growth import Event
from .ledger import Ledger
from .optimizer import parameter_sets
from .passes import WORKS, Pass
from .record import END, Recorded
from .unsharded import unsharded_gradients
from .watch import AnyDtype, Together
from .work import Work


def rehearse(
    job: Job, model: Model, watched: Sequence[str] = (), peaks: Mapping[str, str] = MappingProxyType({})
) -> Recorded:
    """Take a step without memory.

    The model, composed on the meta device, gets fake weights: within FakeTensorMode it could not have been composed,
    and on the meta device FSDP2 does not run (torch 2.13). The optimizer takes a first step beforehand, to have its
    state.

    Args:
        job: of the run.
        model: composed on the meta device.
        watched: modules of its only part, to record when the gradients of their outputs are complete.
        peaks: those of its only part whose work is counted apart, each with the key to count it by.

    Raises:
        ForgeError: for what a run would be refused for.
    """
    found = Recorded(parameters=held_bytes(model.parameters()))
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        allocate_all(job, model)
        found.buffers = held_bytes(_buffers(model))
        found.gradients = held_bytes(parameter for parameter in model.parameters() if parameter.requires_grad)
        rehearsal = _Rehearsal(job, model, found)
        rehearsal.apart = Apart(model.parts[0], peaks)
        for name in watched:
            rehearsal.watch(name)
        optimizer = rehearsal.stepper.optimizer
        found.sets = parameter_sets(optimizer.param_groups)
        with found.trying(lambda: "optimizer"):
            first_step(model, optimizer)
            found.optimizer = held_bytes(state_of(optimizer))
    found.failed = True
    with found.trying(lambda: "activations and communication"), quiet():
        rehearsal.rehearse(fake)
        found.failed = False
    return found


def imagine_optimizer(job: Job, model: Model) -> torch.optim.Optimizer:
    """The optimizer of a model that was composed on the meta device, and gets fake weights."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        allocate_all(job, model)
        return hookspecs.optimizer(model, job)


def allocate_all(job: Job, model: Model) -> None:
    for one in (model, *job.models.values()):
        for part in one.parts:
            _allocate(part)


@contextmanager
def quiet() -> Iterator[None]:
    """Torch logs an operation that has no fake counterpart with its stack; here that is one line of the plan."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextmanager
def unseen_metadata() -> Iterator[None]:
    """Hides operations on global shapes by which DTensor (torch 2.13) finds, once for each cached schema, what an
    operation's result looks like: they are no part of a step."""
    if not dist.is_initialized():  # no DTensors
        yield
        return
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    name = "_propagate_tensor_meta_non_cached"
    original = getattr(ShardingPropagator, name)

    def propagate(*args: Any) -> Any:
        with _disable_current_modes():
            return original(*args)

    with patch.object(ShardingPropagator, name, propagate):
        yield


def _allocate(part: nn.Module) -> None:
    ties = tied_groups(part)
    part.to_empty(device="cpu")
    retie(part, ties)


def _buffers(model: Model) -> list[Tensor]:
    """Every buffer once."""
    return list({id(buffer): buffer for part in model.parts for buffer in part.buffers()}.values())


def first_step(model: Model, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


class _Rehearsal(Watcher):
    """A step whose every operation is looked at."""

    def __init__(self, job: Job, model: Model, found: Recorded) -> None:
        self.found = found
        self.ledger = Ledger()
        self.stepper = build_stepper(job, model, self)
        self.passes = passes_of(self.stepper, found)
        found.accumulation = self.stepper.accumulation
        self.apart = Apart(model.parts[0], {})
        self._begun: Counter[tuple[int, str]] = Counter()
        self._index = 0
        self._updating = False

    def watch(self, name: str) -> None:
        """Record when the gradient of a module's output is complete: its backward pass begins."""

        def reached(_: Tensor) -> None:
            self.found.reached.append((len(self.ledger.changes), name))

        def look(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            first = out[0] if isinstance(out, tuple) else out
            if isinstance(first, Tensor) and first.requires_grad:
                first.register_hook(reached)  # type: ignore[no-untyped-call]  # torch has no types there

        self.stepper.model.parts[0].get_submodule(name).register_forward_hook(look)

    def data(self, job: Job, split: str) -> Loader:
        return Examples(job, self.found)

    def on_micro_batch(self, micro: MicroBatch) -> None:
        key = (micro.part, micro.direction)
        self._index = self._begun[key]
        self._begun[key] += 1
        if self.found.executor is not None and micro.direction in WORKS:
            self.found.passes.append(Pass(len(self.ledger.changes), micro.part, WORKS[micro.direction]))

    def rehearse(self, fake: FakeTensorMode) -> None:
        """Fetch micro-batches as a run does, and train on them."""
        stepper, model = self.stepper, self.stepper.model
        model.train()
        with Collectives(self._send):  # a weight is a number: real tensors
            batches, counts = stepper.fetch(stepper.loader, self.passes)
        ledger = self.ledger
        logits = _Logits(ledger, model)
        resident = [*model.parameters(), *_buffers(model), *state_of(stepper.optimizer)]
        watches = Together(AnyDtype(), ledger, Collectives(self._send), Work(self._compute))
        with fake, unseen_metadata(), watches, unsharded_gradients(ledger) as unsharded:
            own = ledger.numbers(resident)
            batches = [batch.map(fake.from_tensor) for batch in batches]
            stepper.job.step.batches = batches
            update = stepper.gradients(1, batches, counts)
            end = len(ledger.changes)
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            self.found.gradients = held_bytes(gradients)
            own |= ledger.numbers([*model.parameters(), *gradients])
            if self.found.optimizer is not None:
                self._updating = True
                stepper.apply(update)
        self.found.apart = dict(self.apart.flops)
        self._record(ledger.changes, end, {"own": own, "unsharded": unsharded, "logits": logits.numbers()})
        if {number for (_, way), number in self._begun.items() if way in ("both", "forward")} != {self.passes}:
            self.found.notes.append(
                f"the executor does not announce micro-batches: the step is counted with {self.passes} of "
                f"{stepper.accumulation}"
            )

    @property
    def _times(self) -> int:
        """Return how often a current event happens in a step: the second micro-batch stands for those left out."""
        return self.stepper.accumulation - self.passes + 1 if self._index == 1 else 1

    def _record(self, changes: list[tuple[int, int]], end: int, kinds: dict[str, set[int]]) -> None:
        kind_of = {number: kind for kind, numbers in reversed(kinds.items()) for number in numbers}
        events = [Event(kind_of.get(number, ""), (size,)) for number, size in changes]
        self.found.changes = [*events[:end], END, *events[end:]]

    def _send(self, one: Collective) -> None:
        if one.ranks > 1:
            self._call(Event(("send", self._times, one.kind, one.group, one.ranks), (one.held,)))

    def _compute(self, flops: float, size: int, attention: bool) -> None:
        fusible = not flops and not self._updating
        self.apart.count(flops * self._times)
        if self._call(Event(("kernel", self._times, fusible, attention), (flops, size))) and torch.is_grad_enabled():
            self.found.recomputed += self._times

    def _call(self, event: Event) -> bool:
        """Record a call, and return True within a backward pass."""
        self.found.calls.append(event)
        if backward := torch._C._current_graph_task_id() != -1:
            self.found.backward.append(event)
        return backward


class Examples:
    """Micro-batches as the data's plugin describes them."""

    def __init__(self, job: Job, found: Recorded) -> None:
        self._job, self._found = job, found

    def __iter__(self) -> Examples:
        return self

    def __next__(self) -> Batch:
        return replace(self._batch)

    @cached_property
    def _batch(self) -> Batch:
        example = example_of(self._job)
        self._found.notes += example.notes
        return example.batch

    def state_dict(self) -> dict[str, Any]:
        return {"sequences": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def skip(self, sequences: int) -> None:
        pass


class _Logits:
    """Storages that hold logits: those with the head's output shape, while the head and the loss run forward,
    backward or in recomputation."""

    def __init__(self, ledger: Ledger, model: Model) -> None:
        self._ledger = ledger
        self._widths: set[tuple[int, int]] = set()
        for part in model.parts:
            if (head := getattr(part, "head", None)) is not None:
                head.register_forward_pre_hook(self._open)
                head.register_forward_hook(self._look)

    def numbers(self) -> set[int]:
        shapes = self._ledger.shapes.items()
        return {number for number, shape in shapes if shape and (math.prod(shape), shape[-1]) in self._widths}

    def _open(self, head: nn.Module, args: tuple[Any, ...]) -> None:
        self._ledger.keep_shapes = True
        if args and args[0].requires_grad:
            args[0].register_hook(self._close)

    def _look(self, head: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        self._widths.add((local(out).numel(), local(out).shape[-1]))

    def _close(self, gradient: Tensor) -> None:
        self._ledger.keep_shapes = False
