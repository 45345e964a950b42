"""A measured cluster as a TOML file, with the source of each number."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forge_train.base.strict_json import dumps
from forge_train.compose.compose import compose
from forge_train.mesh.axes import CONFIGURED
from forge_train.mesh.layout import Layout
from forge_train.mesh.world import World
from forge_train.plugin.job import Job
from forge_train.registry.setup import Setup
from forge_train.run.run import Run

from ..planning.clusters import KINDS, Rate
from ..planning.imagined import imagined
from .fitting import Sample, fit, worst
from .timing import Shape


def products_of(setup: Setup) -> Counter[Shape]:
    """Matrix products of a forward pass of a micro-batch in one process: rows, columns and depth → how many.

    Raises:
        ConfigError: for a configuration that can't be composed.
    """
    alone = replace(setup.config.parallel, **dict.fromkeys(CONFIGURED, 1))
    config = replace(setup.config, parallel=alone)
    with imagined(Layout.of(alone, 1), World()) as context:
        model = compose(Job.of(config, setup.hooks, Run(Path("runs/plan")), context), allocate=False).model
    train, found = config.train, Counter[Shape]()
    for module in (module for part in model.parts for module in part.modules()):
        if not isinstance(module, nn.Embedding):
            for one in module.parameters(recurse=False):
                if one.ndim == 2:
                    found[train.micro_batch * train.sequence, one.shape[0], one.shape[1]] += 1
    return found


@dataclass(frozen=True)
class Fitted:
    """A kind of collective at a level of the network."""

    level: str
    kind: str
    """`all` for one rate that fits all kinds."""
    rate: Rate
    worst: float
    """Largest relative error of the fit."""
    samples: int


@dataclass(frozen=True)
class ClusterFile:
    """The measurements of a cluster.

    Args:
        found: `timing.worker`'s.
        products: those of the model, in the order in which they were measured.
    """

    found: Mapping[str, Any]
    products: Mapping[Shape, int]

    @property
    def samples(self) -> list[Sample]:
        return [Sample(**one) for one in self.found["samples"]]

    @property
    def fits(self) -> list[Fitted]:
        """Rates of each level, the fastest first: of all kinds together, then of each."""
        local, world, made = self.found["local"], self.found["world"], []
        levels = {"node": [one for one in self.samples if local % one.ranks == 0]}
        levels["cluster"] = [one for one in self.samples if local % one.ranks]
        for level, some in levels.items():
            if some:
                for kind in ("all", *KINDS):
                    own = some if kind == "all" else [one for one in some if one.kind == kind]
                    if own:
                        rate = fit(own)
                        made.append(Fitted(level, kind, rate, worst(own, rate), len(own)))
        assert made, f"no group of {world} ranks was measured"
        return made

    @property
    def peaks(self) -> dict[str, float]:
        """Precision → FLOP/s of the fastest product."""
        return {name: max(rates) for name, rates in self.found["products"].items()}

    def efficiency(self, precision: str) -> float:
        """Share of the peak that the model's products reach together."""
        work = [2.0 * rows * columns * depth * times for (rows, columns, depth), times in self.products.items()]
        seconds = sum(one / rate for one, rate in zip(work, self.found["products"][precision], strict=False))
        return sum(work) / seconds / self.peaks[precision] if work else 1.0

    def text(self, precision: str, model: str) -> str:
        """The file.

        Args:
            precision: of the efficiency.
            model: whose products were measured.
        """
        found = self.found
        day, where = time.strftime("%Y-%m-%d"), f"{found['backend']}, {found['world']} ranks"
        when = f"measured {day}, torch {torch.__version__}, {where}"
        lines = [
            f"name = {dumps(found['device'] + ', measured')}",
            f"devices = {found['local']}",
            f"memory = {found['memory']:.6g}",
            f"bandwidth = {found['bandwidth']:.4g}",
            f"efficiency = {self.efficiency(precision):.4g}",
            f"launch = {found['launch']:.3g}",
            f"hides = {dumps(found['hides'])}",
            "",
            "[peak]",
            *(f"{name} = {value:.4g}" for name, value in self.peaks.items()),
        ]
        sources = {
            "devices": "ranks of a node in the measurement",
            "memory": "physical memory of a node over its ranks" if found["device"].startswith("CPU") else "the driver",
            "bandwidth": f"{when}: a copy, read and written, on all ranks at once",
            "efficiency": f"{when}: matrix products of {model} and of their gradients in {precision} over the peak",
            "launch": f"{when}: the kernels of a small layer, forward and backward",
            "hides": "a processor has no other to work beside it"
            if not found["hides"]
            else "kernels run beside the host",
            "peak": f"{when}: the fastest matrix product, on all ranks at once",
        }
        fits = self.fits
        levels = list(dict.fromkeys(one.level for one in fits))
        for level in levels:
            own = {one.kind: one for one in fits if one.level == level}
            lines += ["", "[[links]]", f'level = "{level}"']
            if level != levels[-1]:
                lines.append(f"ranks = {found['local']}")
            lines += _rate(own["all"].rate)
            for kind in (kind for kind in own if kind != "all"):
                lines += ["", f"[links.measured.{kind}]", *_rate(own[kind].rate)]
            for key in ("bandwidth", "latency"):
                sources[f"links.{level}.{key}"] = (
                    f"{when}: least squares over {own['all'].samples} times of collectives"
                )
            sources[f"links.{level}.measured"] = f"{when}: the same for each kind"
        lines += ["", "[sources]"]
        lines += [f"{dumps(key) if '.' in key else key} = {dumps(value)}" for key, value in sources.items()]
        return "\n".join(lines) + "\n"


def _rate(rate: Rate) -> list[str]:
    return [f"bandwidth = {rate.bandwidth:.4g}", f"latency = {rate.latency:.4g}"]
