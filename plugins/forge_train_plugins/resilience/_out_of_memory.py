"""Builds the out-of-memory report: the requested size and where, memory by part, and settings that would help."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from forge_train import Finished, ForgeError, Job, Model
from forge_train.base.format import format_bytes
from forge_train.mesh.tensors import held_bytes
from forge_train.registry.discovery import discover
from forge_train.step.aggregate import memory_gib
from forge_train_kit.facts import SAVES
from forge_train_kit.failures import phase_of
from forge_train_kit.optim import state_of
from forge_train_kit.source import Source

_NO_MEMORY = re.compile(r"can't allocate memory|out of memory|Cannot allocate memory|std::bad_alloc", re.IGNORECASE)
_ASKED = re.compile(r"tried to allocate ([\d.]+) ?(\w+)", re.IGNORECASE)
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_WORDS = {
    "data": "reading batches",
    "optimizer": "the optimizer",
    "step": "between backward and optimizer",
    "evaluate": "evaluation",
    "save": "saving a checkpoint",
    "load": "loading a checkpoint",
    "loop": "between steps",
    "build": "building",
}
"""Phases of a run in words, where their name is none."""
_KEPT = ("parameters", "gradients", "optimizer")
"""Parts of what a rank holds that can be spread over ranks."""
_WORTH, _MOST = 0.1, 0.5
"""The share of what is held that spreading it must be about, and that of activations to be suspected anywhere."""


class OutOfMemoryError(ForgeError):
    """A tensor found no memory."""

    type = "memory"


@dataclass(frozen=True)
class Held:
    """Bytes that this rank held at its peak."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    """All other bytes: activations, gathered weights, and temporary buffers of kernels."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations

    def share(self, parts: Iterable[str]) -> float:
        """Of some of the parts, from 0 to 1."""
        return sum(getattr(self, part, 0) for part in parts) / max(self.total, 1)


class Report:
    """The out-of-memory report of a failed run.

    Args:
        failed: the run, and its error.
        job: the run's.
        besides: bytes of the process that are no part of the run, such as the interpreter and its libraries.
    """

    def __init__(self, failed: Finished, job: Job, besides: int) -> None:
        self._failed, self._job, self._besides = failed, job, besides

    def error(self) -> OutOfMemoryError | None:
        """Build the report; None for other errors."""
        error, step = self._failed.error, self._failed.step
        if error is None or (asked := requested(error)) is None:
            return None
        place, held = phase_of(error), self.peak()
        words = _WORDS.get(place, place)
        at = words if place in ("build", "start") else f"step {step + 1}, {words}"
        more = (
            f"{format_bytes(asked)} more were asked for ({asked:,} bytes)" if asked else "the requested size is unknown"
        )
        lines = [f"Out of memory on {self._job.device} ({at}): {more}.", "This rank's peak, by part:"]
        lines += [f"  {part:<12} {format_bytes(count):>10}" for part, count in asdict(held).items()]
        advice = list(self._advice(place, held))
        lines += ["What would help:", *(f"  {line}" for line in advice)] if advice else []
        return OutOfMemoryError("\n".join([*lines, f"The traceback is in {self._failed.log}."]))

    def peak(self) -> Held:
        """Memory by part; a run that has completed a step held all gradients once, even if they are gone."""
        model, optimizer = self._failed.model, self._failed.optimizer
        parameters = list(model.parameters()) if model else []
        stepped = self._failed.step > 0
        gradients = [p for p in parameters if p.requires_grad] if stepped else [p.grad for p in parameters]
        tensors = state_of(optimizer) if optimizer else []
        known = Held(held_bytes(parameters), held_bytes(gradients), held_bytes(tensors), 0)
        if optimizer is None:
            return known
        most = resident(self._job.device, peak=True) - self._besides
        return replace(known, activations=max(most - known.total, 0))

    def _advice(self, place: str, held: Held) -> Iterator[str]:
        if place in ("forward", "backward", "evaluate", "data") or held.share(["activations"]) > _MOST:
            yield from self._about_activations()
        if place in ("build", "optimizer") or held.share(_KEPT) > _WORTH:
            yield from self._about_ranks(held)

    def _about_activations(self) -> Iterator[str]:
        train = self._job.config.train
        if (now := train.micro_batch) > 1:
            fewer = now // next(n for n in range(2, now + 1) if now % n == 0)
            yield f"-s train.micro_batch={fewer} (now {now}): the same batch in more, smaller passes"
        elif (now := train.sequence) > 1:
            yield f"-s train.sequence={now // 2} (now {now}): a micro-batch is one sequence already"
        enabled = self._job.hooks.enabled
        for found in discover():
            if "activations" in SAVES.read(found) and found.name not in enabled:
                yield f"--plugins {found.name}: {Source(found).summary}"

    def _about_ranks(self, held: Held) -> Iterator[str]:
        """Spread over ranks what each of them holds."""
        world = self._job.dist.world
        spreading = [name for name, one in self._job.hooks.enabled.items() if set(_KEPT) & set(SAVES.of(one.cls))]
        # The ranks of one machine share its memory, unless they bring devices of their own.
        apart = " on other machines" if self._job.device.type == "cpu" else ""
        if spreading and world > 1:
            yield f"more ranks{apart} (now {world}): {' and '.join(spreading)} gives each of them a smaller share"
            return
        best = max(discover(), key=lambda found: held.share(set(_KEPT) & set(SAVES.read(found))))
        if set(_KEPT) & set(SAVES.read(best)):
            more = f" with several ranks{apart}" if world == 1 else ""
            yield f"--plugins {best.name}{more}: {Source(best).summary}"


def requested(error: BaseException) -> int | None:
    """Bytes that were asked for in vain, 0 where the error does not say; None if it is another error."""
    if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and not (
        isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error))
    ):
        return requested(error.__cause__) if error.__cause__ else None
    found = _ASKED.search(str(error))
    return int(float(found[1]) * _UNITS.get(found[2], 0)) if found else 0


def resident_besides(device: torch.device, model: Model, optimizer: torch.optim.Optimizer) -> int:
    """Bytes in use now that are neither parameters nor states of the optimizer."""
    return max(resident(device) - held_bytes((*model.parameters(), *state_of(optimizer))), 0)


def resident(device: torch.device, *, peak: bool = False) -> int:
    """Bytes in use: of the device's tensors on CUDA, of the whole process elsewhere. Now, or at most so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) if peak else torch.cuda.memory_allocated(device)
    status = Path("/proc/self/status")  # a process's own; what getrusage says begins with its parent's
    if not status.exists():
        return int(memory_gib(device) * 2**30)
    found = re.search(rf"^{'VmHWM' if peak else 'VmRSS'}:\s*(\d+) kB", status.read_text(encoding="ascii"), re.MULTILINE)
    return 1024 * int(found[1]) if found else 0
