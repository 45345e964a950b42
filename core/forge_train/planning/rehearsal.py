"""One optimizer step of one rank on fake tensors: what it would keep, send and compute."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..composition.initialise import retie, tied_groups
from ..composition.model import Model
from ..errors import ForgeError, describe
from ..job import Job
from ..loop.step import Stepper
from ..protocols import Batch
from .communication import Collective, Collectives
from .ledger import Ledger, held, local, state_of
from .roofline import Kernel
from .watch import AnyDtype
from .work import Work

PASSES = 3
"""Micro-batches of a rehearsal: the first, the last, and one that stands for all between them."""


@dataclass
class Rehearsed:
    """What one rank does in a step, after its first one. None is what could not be found; `notes` say why."""

    gradients: int = 0
    """Bytes of the gradients that the optimizer is given; where a step could not be taken, of what they belong to."""
    optimizer: int | None = None
    """Bytes of its state."""
    buffers: int = 0
    activations: int | None = None
    """The most bytes at once of all that is no parameter, buffer, gradient or state of the optimizer."""
    logits: int | None = None
    """The most at once of what has the shape of the head's results."""
    peak: int | None = None
    """The most bytes at once of everything."""
    sent: Counter[Collective] = field(default_factory=Counter)
    """Collective → how often."""
    kernels: Counter[Kernel] = field(default_factory=Counter)
    """Kernel → how often."""
    notes: list[str] = field(default_factory=list)

    def not_found(self, what: str, error: Exception) -> None:
        self.notes.append(f"{what}: not known before it is allocated ({describe(error)})")


def rehearse(job: Job, model: Model) -> Rehearsed:
    """Take a step without memory.

    The model, composed on the meta device, gets fake weights: within FakeTensorMode it could not have been composed,
    and on the meta device FSDP2 does not run (torch 2.13). The optimizer takes a first step beforehand, to have its
    state.

    Raises:
        ForgeError: for what a run would be refused for.
    """
    found = Rehearsed()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        for part in model.parts:
            _allocate(part)
        found.buffers = held(_buffers(model))
        found.gradients = held(parameter for parameter in model.parameters() if parameter.requires_grad)
        optimizer = job.hooks.optimizer(model)
        try:
            _first_step(model, optimizer)
            found.optimizer = held(state_of(optimizer))
        except ForgeError:
            raise
        except Exception as error:  # an optimizer that reads values has no fake step
            found.not_found("optimizer", error)
        rehearsal = _Rehearsal(job, model, optimizer, found)
    try:
        with _quiet():
            rehearsal.rehearse(fake)
    except ForgeError:
        raise
    except Exception as error:  # so has a model
        found.sent.clear()
        found.kernels.clear()
        found.not_found("activations and communication", error)
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Torch logs an operation that has no fake counterpart with its stack; here that is one line of the plan."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _allocate(part: nn.Module) -> None:
    ties = tied_groups(part)
    part.to_empty(device="cpu")
    retie(part, ties)


def _buffers(model: Model) -> list[Tensor]:
    """Every buffer once."""
    return list({id(buffer): buffer for part in model.parts for buffer in part.buffers()}.values())


def _first_step(model: Model, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


class _Rehearsal(Stepper):
    """A step whose every operation is looked at."""

    def __init__(self, job: Job, model: Model, optimizer: torch.optim.Optimizer, found: Rehearsed) -> None:
        watched = _Watched(model, self._begin)
        super().__init__(job, watched, optimizer, job.hooks.lr_schedule(optimizer), _Examples(job, found))
        self.found = found
        self.passes = min(self.accumulation, PASSES)
        self._begun = 0
        self._updating = False

    def rehearse(self, fake: FakeTensorMode) -> None:
        """Fetch micro-batches as a run does, and train on them."""
        self.model.train()
        with Collectives(self._send):  # a weight is a number: real tensors
            batches, counts = self.fetch(self.loader, self.passes)
        ledger = Ledger()
        logits = _Logits(ledger, self.model)
        resident = [*self.model.parameters(), *_buffers(self.model), *state_of(self.optimizer)]
        with fake, AnyDtype(), ledger, Collectives(self._send), Work(self._compute):
            own = ledger.numbers(resident)
            update = self._backward(1, [_faked(batch, fake) for batch in batches], counts)
            end = len(ledger.changes)
            gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
            self.found.gradients = held(gradients)
            own |= ledger.numbers([*self.model.parameters(), *gradients])
            if self.found.optimizer is not None:
                self._updating = True
                self._apply(update)
        self.found.activations = ledger.peak(but=own, until=end)
        self.found.logits = ledger.peak(logits.numbers(), until=end)
        self.found.peak = ledger.peak()
        if self._begun != self.passes:
            self.found.notes.append(
                f"the executor does not announce micro-batches: the step is counted with {self.passes} of "
                f"{self.accumulation}"
            )

    def _begin(self) -> None:
        self._begun += 1

    @property
    def _times(self) -> int:
        """How often what happens now happens in a step: the second of three micro-batches stands for those between."""
        return self.accumulation - self.passes + 1 if self._begun == PASSES - 1 else 1

    def _send(self, collective: Collective) -> None:
        if collective.ranks > 1:
            self.found.sent[collective] += self._times

    def _compute(self, flops: float, size: int) -> None:
        self.found.kernels[Kernel(flops, size, fusible=not flops and not self._updating)] += self._times


class _Watched(Model):
    """The model, telling when a micro-batch begins."""

    def __init__(self, model: Model, tell: Callable[[], None]) -> None:
        self.__dict__ |= vars(model)
        self._tell = tell

    def on_micro_batch(self, last: bool) -> None:
        self._tell()
        super().on_micro_batch(last)


class _Examples:
    """Micro-batches as the data's plugin describes them."""

    def __init__(self, job: Job, found: Rehearsed) -> None:
        self._job, self._found = job, found

    def __iter__(self) -> _Examples:
        return self

    def __next__(self) -> Batch:
        return replace(self._batch)

    @cached_property
    def _batch(self) -> Batch:
        hooks, train = self._job.hooks, self._job.config.train
        if batch := hooks.example_batch():
            return batch
        self._found.notes.append(
            f"batches are taken for token ids and labels: plugin {hooks.provider('build_data')!r} says nothing of them "
            "(example_batch)"
        )
        ids = torch.zeros(train.micro_batch, train.sequence, dtype=torch.int64)
        return Batch(ids, ids)

    def state_dict(self) -> dict[str, Any]:
        return {"position": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def skip(self, sequences: int) -> None:
        pass


def _faked(batch: Batch, fake: FakeTensorMode) -> Batch:
    def convert(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else fake.from_tensor(tensor)

    return replace(
        batch,
        inputs=fake.from_tensor(batch.inputs),
        labels=fake.from_tensor(batch.labels),
        positions=convert(batch.positions),
        documents=convert(batch.documents),
        extras={name: fake.from_tensor(value) for name, value in batch.extras.items()},
    )


class _Logits:
    """Which storages hold logits: while the head and the loss are at work, forward, backward or once more, those of
    the shape that the head gives."""

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
