"""What compositions are made of: every factor with its values, all pairs of them in few cases, and the full product.

CI takes the covering array, `make verify-all` (benchmarks/verify_all.py) the full product.
"""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_train_tools.configuration.request import Request

SEED_VARIABLE = "FORGE_COVERING_SEED"
SEED = int(os.environ.get(SEED_VARIABLE, "0"))
STEPS = 5
BATCH = 36
"""Sequences a step: every number of data ranks divides it three times over."""

BASE: Mapping[str, Mapping[str, Any]] = {
    "run": {"device": "cpu"},
    "log": {"every": 1},
    "checkpoint": {"every": 0},
    "decoder": {"dim": 32, "heads": 4, "hidden": 48},
}
"""Of every configuration that compositions are laid over: a small decoder, and no more than its steps."""
WORDS = "every layout of one model over any number of processes gives the losses and the gradients of a single one"


@dataclass(frozen=True)
class Layout:
    """How processes are arranged, and by which plugins."""

    world: int
    data_ranks: int
    plugins: tuple[str, ...]
    settings: Mapping[str, Any]


LAYOUTS: Mapping[str, Layout] = {
    "dp2": Layout(2, 2, ("fsdp2",), {}),
    "dp3": Layout(3, 3, ("fsdp2",), {}),
    "dp4": Layout(4, 4, ("fsdp2",), {}),
    "hsdp2×2": Layout(4, 4, ("fsdp2",), {"parallel.dp_replicate": 2}),
    "ddp2": Layout(2, 2, ("ddp",), {}),
    "zero1×2": Layout(2, 2, ("zero1",), {}),
    "zero2×2": Layout(2, 2, ("fsdp2",), {"fsdp2.reshard": "never"}),
    "tp2": Layout(2, 1, ("tp",), {"parallel.tp": 2}),
    "tp4": Layout(4, 1, ("tp",), {"parallel.tp": 4}),
    "tp2×dp2": Layout(4, 2, ("tp", "fsdp2"), {"parallel.tp": 2}),
    "tp2×replicas2": Layout(4, 2, ("tp", "fsdp2"), {"parallel.tp": 2, "parallel.dp_replicate": 2}),
    "tp2×hsdp2×2": Layout(8, 4, ("tp", "fsdp2"), {"parallel.tp": 2, "parallel.dp_replicate": 2}),
}
OTHERS: Mapping[str, Layout] = {
    "replicas2": Layout(2, 2, ("fsdp2",), {"parallel.dp_replicate": 2}),
    "ddp2×2": Layout(4, 4, ("ddp",), {"parallel.dp_replicate": 2}),
    "tp2×dp4": Layout(8, 4, ("tp", "fsdp2"), {"parallel.tp": 2}),
    "zero1 2×2": Layout(4, 4, ("zero1",), {"parallel.dp_replicate": 2}),
}
"""Not a factor's values, but tried as they are."""
IN_CI = tuple(name for name, layout in LAYOUTS.items() if layout.world <= 4 and name != "dp4")
"""The layouts that CI tries; `make test-all` has the others, too: larger ones, and dp4 beside dp2, dp3 and hsdp."""
AC: Mapping[str, Mapping[str, Any]] = {
    "no ac": {},
    "full": {"ac.mode": "full"},
    "every second": {"ac.mode": "full", "ac.every": 2},
    "selective": {"ac.mode": "selective"},
}
ACCUMULATION: Mapping[str, int] = {"one": 1, "three": 3}
HEAD: Mapping[str, Mapping[str, Any]] = {"untied": {}, "tied": {"decoder.tied": True}}
DOCUMENTS: Mapping[str, Mapping[str, Any]] = {"packed": {}, "one text": {"text.isolate": False}}
FACTORS: tuple[Mapping[str, Any], ...] = (LAYOUTS, AC, ACCUMULATION, HEAD, DOCUMENTS)


@dataclass(frozen=True)
class Composition:
    """One value of every factor."""

    layout: str
    ac: str
    accumulation: str
    head: str
    documents: str

    def __str__(self) -> str:
        return ", ".join(vars(self).values())

    @property
    def arranged(self) -> Layout:
        return {**LAYOUTS, **OTHERS}[self.layout]

    @property
    def world(self) -> int:
        return self.arranged.world

    def request(self, file: Path, plugins: Sequence[str] = (), **settings: Any) -> Request:
        """What `forge verify` is asked for it, with more plugins and settings."""
        ac = AC[self.ac]
        micro = BATCH // self.arranged.data_ranks // ACCUMULATION[self.accumulation]
        plugins = (*self.arranged.plugins, *(("ac",) if ac else ()), *plugins)
        return _request(
            file, plugins, {"train.micro_batch": micro, **self.arranged.settings, **ac, **self._model, **settings}
        )

    def reference(self, file: Path, plugins: Sequence[str] = (), **settings: Any) -> Request:
        """The same model and data in one process, and of plugins and settings only those named here."""
        return _request(file, plugins, {"train.micro_batch": BATCH, **self._model, **settings})

    @property
    def _model(self) -> dict[str, Any]:
        return {**HEAD[self.head], **DOCUMENTS[self.documents]}


def _request(file: Path, plugins: Sequence[str], settings: Mapping[str, Any]) -> Request:
    assignments = (f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items())
    return Request(str(file), tuple(plugins), set=tuple(assignments))


def product(layouts: Sequence[str] = tuple(LAYOUTS)) -> Iterator[Composition]:
    """Every composition of some layouts."""
    return (Composition(*values) for values in itertools.product(layouts, *FACTORS[1:]))


def covering(seed: int = SEED, layouts: Sequence[str] = IN_CI) -> list[Composition]:
    """Few compositions in which every two values of different factors meet, those of one world together.

    A layout stands for its plugins there, as their other layouts differ in numbers of ranks alone: one of them meets
    each head, each way to cut documents and a step without accumulation. Every layout meets accumulation, which delays
    what its ranks exchange. From inside a block, activation checkpointing sees only how weights lie: it meets whole,
    gathered and split ones. `make verify-all` takes the full product.

    Greedy, as AETG does it (Cohen et al. 1997, doi:10.1109/32.605761): each begins with a pair that is still missing
    and takes of the other factors, in random order, the value that brings the most missing pairs.
    """
    chance = random.Random(seed)
    names = [list(layouts), *(list(factor) for factor in FACTORS[1:])]
    missing = {
        pair
        for a, b in itertools.combinations(range(len(names)), 2)
        for x, y in itertools.product(names[a], names[b])
        for pair in _pairs({a: x, b: y})
    }
    found = []

    def gain(row: Mapping[int, str], factor: int) -> Callable[[str], tuple[int, int]]:
        """How many missing pairs a value brings; of several layouts, the one with the fewest processes."""
        return lambda value: (
            len(_pairs({**row, factor: value}) & missing),
            -LAYOUTS[value].world if factor == 0 else 0,
        )

    while missing:
        pair = chance.choice(sorted(missing, key=sorted))
        row = {factor: value for factor, value in pair if factor > 0}
        if len(row) == 1:
            row[0] = max((one for one in layouts if pair in _pairs({**row, 0: one})), key=gain(row, 0))
        others = [factor for factor in range(len(names)) if factor not in row]
        for factor in chance.sample(others, len(others)):
            values = chance.sample(names[factor], len(names[factor]))
            row[factor] = max(values, key=gain(row, factor))
        missing -= _pairs(row)
        found.append(Composition(*(row[factor] for factor in range(len(names)))))
    return sorted(found, key=lambda one: (one.world, list(LAYOUTS).index(one.layout)))


def kind(layout: str) -> str:
    """The plugins of a layout."""
    return " and ".join(LAYOUTS[layout].plugins)


def held(layout: str) -> set[str]:
    """How the weights of a block lie: whole, gathered when it runs, or split, or both."""
    return {{"fsdp2": "gathered", "tp": "split"}.get(plugin, "whole") for plugin in LAYOUTS[layout].plugins}


def _pairs(row: Mapping[int, str]) -> set[frozenset[tuple[int, str]]]:
    """The pairs of a row; in those with a layout, what stands for it."""
    values = [item for item in row.items() if item[0] > 0]
    pairs = {frozenset(pair) for pair in itertools.combinations(values, 2)}
    if 0 in row:
        stands = {1: held(row[0]), 2: {kind(row[0]), row[0]}}
        for factor, value in values:
            owners = stands.get(factor, {kind(row[0])}) - ({row[0]} if value == "one" else set())
            pairs |= {frozenset({(0, owner), (factor, value)}) for owner in owners}
    return pairs


def write(folder: Path) -> Path:
    """The model and its text, in a file to build requests on."""
    chance = random.Random(0)
    words: Sequence[str] = WORDS.split()
    lines = (" ".join(chance.choices(words, k=chance.randint(1, 6))) for _ in range(600))  # documents of 5 to 40 bytes
    text = folder / "text"
    text.mkdir()
    (text / "documents.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return write_config(
        folder / "composition.toml",
        ("decoder", "text"),
        run={"seed": 3},
        train={"steps": 5, "global_batch": BATCH, "sequence": 16, "evaluate_every": 5, "evaluate_batches": 2},
        decoder={"layers": 2, "max_sequence": 16},
        text={"path": str(text), "cache": str(folder / "cache"), "held_out": 0.1, "baseline": False},
    )


def write_config(file: Path, plugins: Sequence[str], **sections: Mapping[str, Any]) -> Path:
    """Write `BASE` with more settings, by section; returns the file."""
    lines = [f"plugins = {json.dumps(plugins)}", 'without = ["console", "tensorboard"]']
    for name in BASE | sections:
        values = {**BASE.get(name, {}), **sections.get(name, {})}
        lines += ["", f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file
