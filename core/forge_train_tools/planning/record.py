"""Record of a rehearsal, and the counts from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from forge_train.base.errors import ForgeError, describe
from forge_train_kit.pipeline.timetable import Timetable

from .communication import Collective
from .growth import Event
from .optimizer import ParameterSet
from .passes import Pass
from .roofline import Kernel

END = Event("end", ())
COUNTED = {"own": (), "unsharded": ("unsharded",), "logits": ("activations", "logits"), "": ("activations",)}
"""Kind of a storage → the sums that it is part of, beside that of everything."""


@dataclass
class Recorded:
    """Events of one rank in a step, after its first one. `notes` name what could not be found."""

    parameters: int = 0
    """Bytes."""
    buffers: int = 0
    gradients: int = 0
    """Bytes of the gradients that the optimizer is given; where a step could not be taken, of what they belong to."""
    optimizer: int | None = None
    """Bytes of its state."""
    sets: tuple[ParameterSet, ...] = ()
    """The parameters of its groups."""
    changes: list[Event] = field(default_factory=list)
    """Bytes that a storage gained or lost, in order of time; `END` where the backward pass has ended. A storage's kind
    is `own` (parameters, buffers, gradients, the optimizer's state), `unsharded` (gradients), `logits`, or empty."""
    calls: list[Event] = field(default_factory=list)
    """Kernels and collectives, with how often in a step."""
    backward: list[Event] = field(default_factory=list)
    """Those of a backward pass."""
    recomputed: int = 0
    """Kernels among them that compute again what a forward pass did."""
    executor: Any = None
    """Executor of the step, if it is a pipeline's."""
    followed: Timetable | None = None
    """Timetable that the executor followed."""
    accumulation: int = 1
    """Micro-batches of the step."""
    passes: list[Pass] = field(default_factory=list)
    """Of the executor, in order."""
    reached: list[tuple[int, str]] = field(default_factory=list)
    """Number of memory changes before the gradient of a module's output was complete, and the module, where asked."""
    apart: Mapping[str, float] = field(default_factory=dict)
    """Operations of modules with a peak of their own, by its key."""
    failed: bool = False
    """True if the step could not be taken."""
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def trying(self, what: Callable[[], str]) -> Iterator[None]:
        """Note that something could not be found, and go on: a model or an optimizer that reads values has no fake
        step. What a run would be refused for is raised."""
        try:
            yield
        except ForgeError:
            raise
        except Exception as error:
            self.notes.append(f"{what()}: not known before it is allocated ({describe(error)})")


@dataclass
class Rehearsed:
    """A step's events, counted. None is what could not be found; `notes` say why."""

    gradients: int
    optimizer: int | None
    buffers: int
    unsharded: int | None = None
    """The most bytes at once of gradients that FSDP2 keeps whole between micro-batches."""
    activations: int | None = None
    """The most bytes at once of all that is no parameter, buffer, gradient or state of the optimizer."""
    logits: int | None = None
    """The most at once of what has the shape of the head's results."""
    peak: int | None = None
    """The most bytes at once of everything."""
    backward_peak: int = 0
    """The same until the last backward pass has ended."""
    update_peak: int = 0
    """The same after it."""
    sent: Counter[Collective] = field(default_factory=Counter)
    """Collective → how often."""
    kernels: Counter[Kernel] = field(default_factory=Counter)
    """Kernel → how often."""
    notes: list[str] = field(default_factory=list)


def counted(recorded: Recorded) -> Rehearsed:
    """Sums and maxima over a record."""
    found = Rehearsed(recorded.gradients, recorded.optimizer, recorded.buffers, notes=recorded.notes)
    if recorded.failed:
        return found
    for event in recorded.calls:
        kind, times, *rest = event.kind
        if kind == "kernel":
            flops, size = event.numbers
            found.kernels[Kernel(flops, int(size), *rest)] += times
        else:
            name, group, ranks = rest
            found.sent[Collective(name, group, ranks, int(event.numbers[0]))] += times
    alive = {"everything": 0, "unsharded": 0, "activations": 0, "logits": 0}
    most = dict(alive)
    ended = False
    for event in recorded.changes:
        if event == END:
            ended = True
            continue
        for name in ("everything",) if ended else ("everything", *COUNTED[event.kind]):
            alive[name] += int(event.numbers[0])
            most[name] = max(most[name], alive[name])
        if ended:
            found.update_peak = max(found.update_peak, alive["everything"])
        else:
            found.backward_peak = most["everything"]
    found.peak, found.unsharded = most["everything"], most["unsharded"]
    found.activations, found.logits = most["activations"], most["logits"]
    return found
