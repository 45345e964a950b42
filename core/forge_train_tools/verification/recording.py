"""Recordings of a run's first steps, written to files and read for comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from forge_train.base.strict_json import loads
from forge_train.mesh.layout import Layout
from forge_train.registry.setup import Setup

from .routing import TIE, RoutingCounts, Step, tie_of

SideEffect = Literal["evaluation", "checkpoint"]
Fingerprint = tuple[str, str]
"""Piece of a tensor held by a rank, and a hash of its bytes: equal pieces must have equal hashes."""


@dataclass
class Record:
    """Record of one rank."""

    rank: int
    data_rank: int
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    """Observations of plugins in the first step, without timings; for a histogram, the count of each bin."""
    batches: list[list[str]] = field(default_factory=list)
    """For each step, a hash of each sequence."""
    start: dict[str, str] = field(default_factory=dict)
    """Name → hash of the whole initial weight."""
    pieces: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """Name → what of a weight lies here: from, up to, along each axis."""
    gradients: dict[str, Fingerprint] = field(default_factory=dict)
    """Of the first step."""
    last_gradients: dict[str, Fingerprint] = field(default_factory=dict)
    """Of the last step."""
    weights: dict[str, Fingerprint] = field(default_factory=dict)
    """After the last step, persistent buffers too."""
    saved: dict[str, str] = field(default_factory=dict)
    """Name → hash of every whole tensor that was saved."""
    choices: list[Step] = field(default_factory=list)
    """For each step, what the model has decided."""
    evaluation: list[float] = field(default_factory=list)
    """The held-out loss after the last step, twice; nothing where the run never evaluates."""
    evaluated: list[str] = field(default_factory=list)
    """A hash of each held-out sequence."""
    decided: Step = field(default_factory=dict)
    """Choices of the model in the evaluation."""
    vetoes: dict[str, str] = field(default_factory=dict)
    """Step → why its update was left out."""
    draws: bool = False
    """True if a step's forward and backward pass drew from torch's global random numbers, as dropout does."""
    documents: bool = False
    """True if rows held several documents, kept apart."""
    resumed: list[str] = field(default_factory=list)
    """Differences when the last step is repeated from a checkpoint of the step before."""
    disturbed: dict[SideEffect, dict[str, list[str]]] = field(default_factory=dict)
    """In evaluating and in saving: who changed what of the model and the optimizer. Either must leave them alone."""


@dataclass
class Recording:
    """A run of some steps, on all its ranks."""

    ranks: list[Record]
    gradients: Mapping[str, Tensor]
    """Whole gradients of the first step, before clipping; a parameter without one is left out."""
    parameters: dict[str, str]
    """Name → role, empty where the model declares none."""
    layout: Layout = field(default_factory=Layout)
    tie: float = TIE
    """Tie tolerance in its precision."""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """Persistent buffers after the last step: what a model keeps beside its parameters, such as a router's bias."""
    accumulation: int = 1
    """Micro-batches of a step, of each data rank."""
    micro_batch: int = 1
    """Sequences of each."""

    @property
    def first(self) -> Record:
        return self.ranks[0]

    @property
    def narrow(self) -> bool:
        """True if its precision is narrower than fp32."""
        return self.tie > TIE

    @classmethod
    def read(cls, folder: Path, setup: Setup, world: int) -> Recording:
        """Read the files that the processes of a layout left in a folder."""
        ranks = []
        for rank in range(world):
            values = loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8"))
            for name in ("gradients", "last_gradients", "weights"):
                values[name] = {key: tuple(value) for key, value in values[name].items()}
            values["choices"] = [_tallies(step) for step in values["choices"]]
            values["decided"] = _tallies(values["decided"])
            ranks.append(Record(**values))
        parameters: dict[str, str] = {}
        buffers: dict[str, Tensor] = {}
        for file in sorted(folder.glob("stage-*.pt")):
            stage = torch.load(file, weights_only=True)
            parameters |= stage["parameters"]
            buffers |= stage["buffers"]
        train, layout = setup.config.train, Layout.of(setup.config.parallel, world)
        accumulation = layout.micro_batches(train.batch_at(0), train.micro_batch)
        gradients = read_gradients(folder, 1)[0] if ranks[0].losses else {}
        tie = tie_of(train.precision)
        return cls(ranks, gradients, parameters, layout, tie, buffers, accumulation, train.micro_batch)


def gradients_file(folder: Path, step: int, rank: int | str = "*") -> Path:
    """The gradients of a step, of one stage of a pipeline or of all."""
    return folder / f"step-{step}-rank-{rank}.pt"


def read_gradients(folder: Path, step: int) -> tuple[dict[str, Tensor], Tensor]:
    """Whole gradients that a layout has left of a step, which stay on disk until they are used, and their norm."""
    gradients: dict[str, Tensor] = {}
    norm = torch.zeros(())
    for file in sorted(folder.glob(gradients_file(folder, step).name)):
        stage = torch.load(file, weights_only=True, mmap=True)
        gradients |= stage["gradients"]
        norm = stage["norm"].clone()
    return gradients, norm


def _tallies(step: dict[str, dict[str, Any]]) -> Step:
    for one in step.values():
        one["near"] = {float(tie): count for tie, count in one["near"].items()}
    return {key: RoutingCounts(**one) for key, one in step.items()}
