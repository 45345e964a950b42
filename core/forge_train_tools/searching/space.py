"""The candidates of a configuration and a world, and what closed forms say of them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace
from functools import cache

from forge_train.mesh.tensors import held_bytes
from forge_train_kit.pipeline.parts import cost_of, part_of

from ..configuration.request import Request
from ..configuration.setup import resolve
from ..facts import PEAK
from ..planning.clusters import Cluster
from .candidates import SIZES, Candidate, divisors, layouts, micro_batches, provider
from .composing import Composer
from .forms import Forms, Memory
from .legality import Legality
from .points import DATA, Points
from .schedules import Schedules
from .speed import Speed, speed
from .stages import Cut
from .variants import Choice, Variant, options_of, pinned_keys
from .weights import Weights, entries_of, repetitions, weights_of

MASK = "…"
"""Stands for the numbers of one layout."""
DEEPEST = 32
"""Pipeline stages beyond which nothing is searched."""
WIDEST = 64
"""Ranks of context and expert parallelism beyond which nothing is searched."""


@dataclass(frozen=True)
class Found:
    """A legal layout, by closed forms."""

    candidate: Candidate
    memory: Memory
    speed: Speed
    tokens_per_second: float
    mfu: float | None
    exact: bool = False
    """True if the memory is that of a rehearsal of the whole layout."""


class Space:
    """Everything that closed forms need of a configuration."""

    def __init__(self, request: Request, world: int, cluster: Cluster) -> None:
        self.world, self.cluster, self._pinned = world, cluster, pinned_keys(request)
        setup = resolve(request, world=max(world, 2), data=False, measured=False, training=False)
        self.config = setup.config
        self.request = replace(request, without=setup.config.without)
        self.composer = Composer(self.request, world, on_cuda=True)
        self.points = Points(self.composer, options_of(setup, request))
        self.refused: Counter[str] = Counter()
        stated = {key for one in setup.hooks.enabled.values() if (key := PEAK.of(one.cls))}
        self._peaks = sorted(stated & cluster.peak.keys())
        precision = self.config.train.precision
        for key in sorted(stated - cluster.peak.keys()):
            self.points.notes[f"{cluster.name} has no peak for {key}: its modules count at that of {precision}"] = None
        model = self.composer.look(self.points.variant(self.points.base, {})).model.parts[0]
        train = self.config.train
        self._entries = entries_of(model)
        costs = [
            cost_of(part_of(model, self._entries, range(at, at + 1)), train.sequence)
            for at in range(len(self._entries))
        ]
        units = self.composer.unit_names
        cut = Cut(costs, repetitions(self._entries, units, self.composer.pattern))
        shape = getattr(model, "hidden_shape", None)
        hidden = math.prod(shape(1, train.sequence)) * (4 if train.precision == "fp32" else 2) if shape else 0.0
        declared = getattr(model, "flops_per_token", None)
        self.flops_per_token = float(declared(train.sequence)) if declared else None
        self.forms = Forms(self.points, Schedules(self.composer), cut, self._weights, hidden)
        self._keeps_replicas = cache(self._find_replicas)
        self.legality = Legality(self.forms, self.points, world, train.global_batch)

    def of(self, world: int) -> Space:
        """The same configuration for another number of ranks, with all that is known of the model."""
        other = copy(self)
        other.world, other.refused = world, Counter()
        other.legality = replace(self.legality, world=world)
        other.legality.of_axis = self.legality.of_axis
        return other

    def _weights(self, tp: int, ep: int, etp: int) -> Weights:
        axes = {"tp": tp, "ep": ep, "etp": etp, "dp_shard": ep}
        axes = {axis: size for axis, size in axes.items() if size > 1}
        with self.composer.composed(self.points.variant(self.points.base, axes), axes) as short:
            return weights_of(short, self._entries, self.composer.unit_names, self.composer.pattern)

    def candidates(self) -> Iterator[Candidate]:
        """Layouts whose axes the model can have, with every choice of batches and plugins."""
        train, options = self.config.train, self.points.options
        allowed = {axis: self._allowed(axis) for axis in SIZES}
        pairs = [
            (ep, etp)
            for etp in (self._allowed("etp") if len(self._allowed("ep")) > 1 else [1])
            for ep in self._allowed("ep")
        ]
        every: dict[tuple[str, ...], list[Variant]] = {}
        for sizes in layouts(self.world, allowed, pairs):
            data = sizes["dp_replicate"] * sizes["dp_shard"]
            if train.global_batch % data:
                self.refused["train.global_batch is no multiple of the data-parallel ranks"] += 1
                continue
            axes = tuple(axis for axis in options.axes if sizes.get(axis, 1) > 1)
            if sizes["etp"] > 1 and "ep" in options.axes and "ep" not in axes:
                axes += ("ep",)
            if axes not in every:
                every[axes] = list(options.variants(axes))
            share = train.global_batch // data
            for variant in every[axes]:
                if not self._differs(variant.of(DATA), sizes["dp_replicate"], sizes["dp_shard"] * sizes["cp"]):
                    continue
                for size in micro_batches(share, train.micro_batch if "train.micro_batch" in self._pinned else 0):
                    yield Candidate(**sizes, micro_batch=size, accumulation=share // size, variant=variant)

    def _differs(self, data: Choice, replicas: int, shards: int) -> bool:
        """Return False for another name of a layout that is looked at anyway: one rank has nothing to share, and where
        replicas are sharded like the rest, or nothing is, both axes do the same."""
        if replicas * shards == 1:
            return data == self.points.base.data
        return replicas == 1 or self._keeps_replicas(data)

    def _find_replicas(self, data: Choice) -> bool:
        def held(data: Choice, **axes: int) -> int:
            variant = self.points.variant(replace(self.points.base, data=data), axes)
            with self.composer.composed(variant, axes) as short:
                return held_bytes(short.parameters())

        whole = held(self.points.base.data)
        return held(data, dp_shard=2) < 0.75 * whole <= held(data, dp_replicate=2)

    def _allowed(self, axis: str) -> list[int]:
        """Sizes of an axis that the model can have."""
        configured = getattr(self.config.parallel, axis)
        if f"parallel.{axis}" in self._pinned and configured > 0:
            return [configured]
        sizes = divisors(self.world)
        if (needed := provider(axis)) and needed not in self.points.options.axes:
            return [1]
        if axis in ("dp_shard", "dp_replicate"):
            return sizes
        if axis == "pp":
            sizes = [one for one in sizes if one <= min(len(self._entries), DEEPEST)]
            return [1] if len(sizes) > 1 and self._refuses(("pp", sizes[1])) else sizes
        most = self.cluster.links[0].ranks or WIDEST if axis in ("tp", "etp") else WIDEST
        found = []
        for size in (one for one in sizes if one <= most):
            if size == 1 or not self._refuses(*((("tp", size), (axis, size)) if axis == "etp" else ((axis, size),))):
                found.append(size)
        return found

    def _refuses(self, *sizes: tuple[str, int]) -> bool:
        if reason := self.legality.of_axis(*sizes):
            self.refused[rule(reason)] += 1
        return bool(reason)

    def found(self, c: Candidate, memory: Memory) -> Found:
        """The numbers of a layout that fits."""
        apart = {key: self.forms.flops(c, f"flops {key}") for key in self._peaks}
        took = speed(
            c, self.cluster, self.config.train.precision, self.forms.flops(c), apart,
            self.forms.between(c), self.forms.kernels(c), self.forms.sent(c), memory, self.forms.schedule(c),
        )  # fmt: skip
        rate = self.config.train.tokens_per_step / took.step
        peak = self.cluster.flops(self.config.train.precision)
        mfu = None if self.flops_per_token is None else rate * self.flops_per_token / (self.world * peak)
        return Found(c, memory, took, rate, mfu)


def rule(reason: str) -> str:
    """A reason without the numbers of one layout, so that equal ones count together."""
    return re.sub(r"\d[\d,.]*", MASK, reason.split("\n", 1)[0].split(" (", 1)[0])
