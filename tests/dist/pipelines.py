"""Compositions of pipelines: schedules, ranks, and what they are combined with.

`make test-all` takes a covering array of pairs, CI a part of it that has each value, and `make verify-all`
(benchmarks/verify_all.py) the full product.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import compositions
from forge_train_tools.configuration.request import Request

SCHEDULES = (
    "gpipe", "1f1b", "looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipe_v",
)  # fmt: skip
SPLIT = ("interleaved_zero_bubble", "zbv", "dualpipe_v")
"""Schedules with two halves of a backward pass."""
MODEL: Mapping[str, Any] = {"decoder.layers": 6, "train.global_batch": 16, "train.micro_batch": 2}
"""Eight micro-batches."""
LAYERS = {2: 3, 3: 6, 4: 6}
"""Of a model, by ranks: with the embedding and the head, five parts and eight."""
EXPERTS: Mapping[str, Any] = {
    "moe.experts": 8,
    "moe.hidden": 16,
    "moe.bias_speed": 0.01,
    "moe.z_loss": 0.001,
    "moe.balance": 0.1,
    "moe.shared": 1,
}
DATA: Mapping[str, tuple[tuple[str, ...], Mapping[str, Any]]] = {
    "one rank": ((), {}),
    "fsdp2": (("fsdp2",), {}),
    "never": (("fsdp2",), {"fsdp2.reshard": "never"}),
    "step": (("fsdp2",), {"fsdp2.reshard": "step"}),
    "zero1": (("zero1",), {}),
    "ddp": (("ddp",), {}),
    "hsdp": (("fsdp2",), {"parallel.dp_replicate": 2}),
}
EXTRAS = ("tied", "packed", "ac", "tp", "ep", "experts")
SPREAD = ("tp", "ep", "experts")
"""Extras inside a block, to which a schedule shows itself only by whole or split backward passes."""


@dataclass(frozen=True)
class Piped:
    """A schedule on some ranks, and what is beside it."""

    schedule: str
    ranks: int = 2
    data: str = "one rank"
    extras: frozenset[str] = frozenset()

    def __str__(self) -> str:
        beside = (self.data, *(one for one in EXTRAS if one in self.extras))
        return ", ".join((f"pp{self.ranks}", self.schedule, *beside))

    @property
    def data_ranks(self) -> int:
        return {"one rank": 1, "hsdp": 4}.get(self.data, 2)

    @property
    def world(self) -> int:
        return self.ranks * self.data_ranks * (2 if "tp" in self.extras else 1)

    @property
    def row(self) -> tuple[str, str]:
        """Of the page that `make verify-all` writes."""
        return f"pp{self.ranks}", self.schedule

    @property
    def possible(self) -> bool:
        """Experts need ranks to be spread over; ddp takes whole weights. A part of DualPipeV needs a micro-batch."""
        extras = self.extras
        spread = "ep" not in extras or ("experts" in extras and (self.data_ranks > 1 or "tp" in extras))
        shards = self.data != "ddp" or not {"ep", "tp"} & extras
        enough = self.schedule != "dualpipe_v" or 8 // self.data_ranks >= 2 * self.ranks
        return spread and shards and enough and 8 // self.data_ranks >= self.ranks

    def request(self, file: Path, **settings: Any) -> Request:
        """What `forge verify` is asked for it, with more settings."""
        plugins, values = DATA[self.data]
        extras = self.extras
        asked = {**self._model, "parallel.pp": self.ranks, "pp.schedule": self.schedule, **values}
        asked |= {"parallel.tp": 2} if "tp" in extras else {}
        asked |= {"parallel.ep": 2} if "ep" in extras else {}
        asked |= {"ac.mode": "full"} if "ac" in extras else {}
        found = ["pp", *plugins, *self._plugins, *(one for one in ("tp", "ep", "ac") if one in extras)]
        return compositions._request(file, found, asked | settings)

    def reference(self, file: Path, **settings: Any) -> Request:
        """The same model and data in one process."""
        return compositions._request(file, self._plugins, {**self._model, **settings})

    @property
    def _micro_batches(self) -> int:
        """Eight, or four for a single data rank where they fill all stages."""
        most = 2 * self.ranks if self.schedule == "dualpipe_v" else self.ranks
        return 4 if self.data_ranks == 1 and most <= 4 else 8

    @property
    def _plugins(self) -> list[str]:
        return ["moe"] if "experts" in self.extras else []

    @property
    def _model(self) -> dict[str, Any]:
        model = {
            **MODEL,
            "train.global_batch": 2 * self._micro_batches,
            "decoder.layers": LAYERS[self.ranks],
            "text.isolate": "packed" in self.extras,
            "decoder.tied": "tied" in self.extras,
        }
        return model | (EXPERTS if "experts" in self.extras else {})


@dataclass(frozen=True)
class Everything:
    """Sixteen processes with every axis above 1: pp, dp_replicate, cp and tp, and ep over cp × tp."""

    world = 16
    row = ("pp2 × 2 replicas × cp2 × tp2 × ep2", "interleaved_1f1b")

    def __str__(self) -> str:
        return ", ".join(self.row)

    def request(self, file: Path) -> Request:
        """What `forge verify` is asked for."""
        axes = {f"parallel.{axis}": 2 for axis in ("pp", "dp_replicate", "cp", "tp", "ep")}
        own = {**MODEL, **EXPERTS, **axes, "parallel.dp_shard": 1, "pp.schedule": self.row[1]}
        return compositions._request(file, ("pp", "cp", "tp", "ep", "moe", "fsdp2"), own)

    def reference(self, file: Path) -> Request:
        """The same model and data in one process."""
        return compositions._request(file, ("moe",), {**MODEL, **EXPERTS})


def product(ranks: Sequence[int] = (2, 3, 4), schedules: Sequence[str] = SCHEDULES) -> Iterator[Piped]:
    """Every schedule on every number of ranks, alone and with everything that may be beside it."""
    beside = [frozenset({one}) for one in ("tied", "packed", "ac", "tp", "experts")] + [frozenset({"ep", "experts"})]
    for schedule, count in itertools.product(schedules, ranks):
        for data in DATA:
            for extras in (frozenset[str](), *beside, frozenset(EXTRAS) - {"packed"}):
                one = Piped(schedule, count, data, extras)
                if one.possible and one.world <= 8 and (data in ("one rank", "fsdp2") or not extras):
                    yield one


def covering(seed: int = compositions.SEED) -> list[Piped]:
    """Few pipelines in which whole and split backward passes meet every way to share data and every number of ranks,
    every schedule meets every extra outside of blocks, and every extra every other, both passes and every plugin that
    shares data, as far as four processes allow. Each is the one with the most pairs for its number of processes."""
    chance = random.Random(seed)
    able = [
        one
        for schedule, ranks, data in itertools.product(SCHEDULES, (2, 3, 4), DATA)
        for count in range(len(EXTRAS) + 1)
        for extras in itertools.combinations(EXTRAS, count)
        if (one := Piped(schedule, ranks, data, frozenset(extras))).possible and one.world <= 4
    ]
    chance.shuffle(able)
    missing = set[Any]().union(*map(_pairs, able))
    found = []
    while missing:
        found.append(max(able, key=lambda one: len(_pairs(one) & missing) / one.world))
        missing -= _pairs(found[-1])
    return sorted(found, key=lambda one: (one.world, SCHEDULES.index(one.schedule)))


def values(one: Piped) -> list[tuple[str, Any]]:
    """Each factor of a pipeline with its value."""
    extras = [("extra", extra) for extra in one.extras]
    return [("schedule", one.schedule), ("ranks", one.ranks), ("data", one.data), *extras]


def cost(one: Piped) -> float:
    """About how long a pipeline takes, in seconds."""
    return 3 + one.world * (2 if "experts" in one.extras else 1) * (1.5 if one.schedule in SPLIT else 1)


def _pairs(one: Piped) -> set[Any]:
    split, extras = one.schedule in SPLIT, sorted(one.extras)
    return {
        (split, one.data),
        (split, one.ranks),
        *((split if extra in SPREAD else one.schedule, extra) for extra in extras),
        *((DATA[one.data][0], extra) for extra in extras),
        *itertools.combinations(extras, 2),
    }
