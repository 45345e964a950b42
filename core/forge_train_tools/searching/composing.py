"""Compositions and rehearsals of a model with few of its units: from them, closed forms give those of every layout."""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from torch import nn

from forge_train.compose.compose import Composition, compose
from forge_train.config import Config
from forge_train.mesh.axes import CONFIGURED
from forge_train.mesh.layout import Layout
from forge_train.mesh.tensors import held_bytes
from forge_train.mesh.world import World
from forge_train.plugin.job import Job
from forge_train.registry.setup import Setup
from forge_train.run.run import Run

from ..configuration.request import Request
from ..configuration.setup import resolve
from ..planning import PER_NODE
from ..planning.alike import Pattern, Units, repeating
from ..planning.apart import peaks_of
from ..planning.communication import Names
from ..planning.imagined import imagined
from ..planning.on_cuda import kernels_of_cuda
from ..planning.record import END, Recorded, counted
from ..planning.rehearsal import rehearse
from ..planning.roofline import Kernel
from ..planning.traffic import traffic
from .variants import Variant

AGAIN = "again "
"""Prefix of the numbers of an input gradient that is computed again."""
SHORT = 2
"""Repetitions in the shorter of two rehearsals; the other has one more."""
ENOUGH = 4
"""Micro-batches for each rank of a pipeline, enough for every schedule."""
Sizes = Mapping[str, int]
"""Axis → size; 1 for an axis that is not named."""
Numbers = Mapping[str, float]
"""Measured numbers by name."""


@dataclass(frozen=True)
class Point:
    """A line through two rehearsals: what a model takes by its number of repetitions.

    Of memory, in bytes beyond parameters, buffers and the optimizer's state, the most at once: `top`, until the last
    unit's backward pass has ended, and `inside` while it runs; `end`, from the first unit's, beyond gradients;
    `update`, in the optimizer's step. Each grows evenly with the units, which the largest of them does not. At rest:
    `parameters`, `buffers`, `gradients`, `optimizer`, `unsharded`. Of work: `flops` of kernels, those of modules with a
    peak of their own once more as `flops KEY`, bytes of the kernels `between` products, and how many `kernels` there
    are. Of communication, by kind and axes: `calls KIND AXES` and `held KIND AXES`. What a backward pass takes without
    the gradients of weights has the same names with `AGAIN` before them, and `recomputed` are its kernels that compute
    a forward pass again.
    """

    rest: Numbers
    unit: Numbers
    notes: tuple[str, ...] = ()

    def of(self, name: str, repetitions: float) -> float:
        return self.rest.get(name, 0.0) + repetitions * self.unit.get(name, 0.0)


class Composer:
    """Composes the model of a request for layouts that the search asks about.

    Args:
        request: the user's.
        world: ranks of the search, for the plugins that several processes have.
        on_cuda: whether memory is that of CUDA's kernels.
        folder: what plugins are told the run folder is.
    """

    def __init__(self, request: Request, world: int, *, on_cuda: bool, folder: Path = Path("runs/plan")) -> None:
        self.request, self.world = request, world
        self._on_cuda, self._folder = on_cuda, folder
        self._setups: dict[tuple[Variant, bool], Setup] = {}
        self.pattern: Pattern | None = None
        self.unit_names: tuple[str, ...] = ()

    def setup(self, variant: Variant, *, several: bool = True) -> Setup:
        """Plugins and options of a variant; axes and batches of no layout in particular.

        Raises:
            ConfigError: for plugins that do not fit together.
        """
        key = (variant, several)
        if key not in self._setups:
            request = variant.request(self.request)
            world = max(self.world, 2) if several else 1
            self._setups[key] = resolve(request, world=world, data=False, measured=False, training=False)
        return self._setups[key]

    @contextmanager
    def job(self, variant: Variant, sizes: Sizes, micro_batch: int, accumulation: int) -> Iterator[Job]:
        """A job of the first rank of a layout."""
        world = math.prod(size for axis, size in sizes.items() if axis not in ("ep", "etp"))
        setup = self.setup(variant, several=world > 1)
        config = configured(setup.config, sizes, micro_batch, accumulation)
        kernels = kernels_of_cuda() if self._on_cuda else nullcontext()
        place = World(size=world, local_size=min(world, PER_NODE))
        with _young_garbage(), kernels, imagined(Layout.of(config.parallel, world), place) as context:
            yield Job.of(config, setup.hooks, Run(self._folder), context)

    def look(self, variant: Variant) -> Composition:
        """Compose the whole model for one process, and find the units that repeat."""
        units = Units()
        with self.job(variant, {}, 1, 1) as job:
            composition = compose(job, allocate=False, change=units.look)
        self.pattern, self.unit_names = repeating(units), units.names
        return composition

    @property
    def repetitions(self) -> int:
        return self.pattern.times if self.pattern else 1

    def short(self, job: Job, times: int) -> Composition:
        """Compose the model with so many repetitions of its units."""
        gone: range = range(0)
        if self.pattern is not None and self.pattern.times > times:
            first = self.pattern.first + self.pattern.size * times
            gone = range(first, self.pattern.first + self.pattern.size * self.pattern.times)
        return compose(job, allocate=False, change=Units(gone).look)

    @contextmanager
    def composed(self, variant: Variant, sizes: Sizes, *, micro_batch: int = 1) -> Iterator[nn.Module]:
        """A short model for a layout.

        Raises:
            ConfigError: for a layout that this model can't have.
        """
        with self.job(variant, sizes, micro_batch, ENOUGH * sizes.get("pp", 1)) as job:
            yield self.short(job, 1).model.parts[0]

    def rehearse(self, variant: Variant, sizes: Sizes, *, micro_batch: int = 1, accumulation: int = 1) -> Point:
        """Rehearse two short models; of one without repetitions, the whole of it."""
        few = min(SHORT, self.repetitions)
        first, notes = self._rehearse(variant, sizes, micro_batch, accumulation, few)
        if self.repetitions < SHORT + 1:
            return Point(first, {}, notes)
        second, _ = self._rehearse(variant, sizes, micro_batch, accumulation, few + 1)
        unit = {name: value - first.get(name, 0.0) for name, value in second.items()}
        return Point({name: value - few * unit[name] for name, value in first.items()}, unit, notes)

    def _rehearse(
        self, variant: Variant, sizes: Sizes, micro_batch: int, accumulation: int, times: int
    ) -> tuple[Numbers, tuple[str, ...]]:
        with self.job(variant, sizes, micro_batch, accumulation) as job:
            composition = self.short(job, times)
            model, peaks = composition.model, peaks_of(job, composition)
            units = tuple(getattr(model.parts[0], "units", ()))
            recorded = rehearse(job, model, tuple(dict.fromkeys((*units[:1], *units[-2:]))), peaks)
            found, again = counted(recorded), counted(replace(recorded, calls=recorded.backward))
            sent, sent_again = (traffic(one, Names(job.dist)) for one in (found, again))
        held, state = held_bytes(model.parameters()), found.optimizer or 0
        rest = held + found.buffers + state
        gradients = found.gradients
        numbers: dict[str, float] = {
            "parameters": held,
            "buffers": found.buffers,
            "gradients": gradients,
            "optimizer": state,
            "unsharded": found.unsharded or 0,
            **_moments(recorded, units, rest, gradients),
            "update": max(found.update_peak - rest, 0),
            "flops": sum(kernel.flops * times for kernel, times in found.kernels.items()),
            **{f"flops {key}": flops for key, flops in recorded.apart.items()},
            "between": sum(kernel.bytes * times for kernel, times in found.kernels.items() if kernel.fusible),
            "kernels": sum(found.kernels.values()),
            **_again(found.kernels, again.kernels, recorded.recomputed),
        }
        for prefix, collectives in (("", sent), (AGAIN, sent_again)):
            for one in collectives:
                factor = 1.0 if one.kind == "send" else (2.0 if one.kind == "all_reduce" else 1.0) * (1 - 1 / one.ranks)
                numbers[f"{prefix}calls {one.kind} {one.axis}"] = one.count
                numbers[f"{prefix}held {one.kind} {one.axis}"] = one.bytes / factor
        return numbers, tuple(found.notes)


@contextmanager
def _young_garbage() -> Iterator[None]:
    """Keeps garbage collection to what is made inside: an imagined world collects what it was when it ends, and to
    look through everything else that torch and the search hold takes longer than a composition."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _again(every: Counter[Kernel], backward: Counter[Kernel], recomputed: int) -> dict[str, float]:
    """The work of a backward pass without gradients of weights: each takes as much as the product of its weight."""
    products = {one: count for one, count in (every - backward).items() if one.flops and not one.attention}
    return {
        f"{AGAIN}flops": sum(one.flops * count for one, count in backward.items())
        - sum(one.flops * count for one, count in products.items()),
        f"{AGAIN}between": sum(one.bytes * count for one, count in backward.items() if one.fusible),
        f"{AGAIN}kernels": sum(backward.values()) - sum(products.values()),
        "recomputed": recomputed,
    }


def _moments(recorded: Recorded, units: Sequence[str], rest: int, gradients: int) -> dict[str, float]:
    """The most bytes at once beyond those at rest, while all units are kept, and when the last ones are."""
    end = recorded.changes.index(END) if END in recorded.changes else 0
    levels = list(accumulate((int(one.numbers[0]) for one in recorded.changes[:end]), initial=0))
    before = [at for at, name in recorded.reached if name == units[-2]] if len(units) > 1 else []
    last = [at for at, name in recorded.reached if units and name == units[0]]
    top, bottom = (before[-1] if before else end), (last[-1] if last else 0)
    first = [at for at, name in recorded.reached if units and name == units[-1]]
    inside = max(levels[first[-1] if first else 0 : top + 1])
    return {
        "top": max(levels[: top + 1]) - rest,
        "inside": inside - rest,
        "end": max(levels[bottom:]) - rest - gradients,
    }


def configured(config: Config, sizes: Sizes, micro_batch: int, accumulation: int) -> Config:
    """A configuration with a layout, and batches of so many micro-batches for each data-parallel rank."""
    axes = {one.name: 1 for one in config.parallel.__axes__}
    parallel = replace(config.parallel, **{**dict.fromkeys(CONFIGURED, 1), **axes, **sizes})
    data = sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1)
    train = replace(
        config.train, micro_batch=micro_batch, global_batch=micro_batch * accumulation * data, batch_warmup=()
    )
    return replace(config, parallel=parallel, train=train)
