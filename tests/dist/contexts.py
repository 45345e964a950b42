"""Compositions of context parallelism: sizes, methods, and what they are combined with.

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

BATCH = 12
MODEL: Mapping[str, Any] = {
    "train.global_batch": BATCH,
    "train.sequence": 48,
    "decoder.max_sequence": 48,
    "decoder.dim": 48,
    "decoder.heads": 12,
    "text.isolate": False,
}
KEY_HEADS = {2: 2, 3: 1, 4: 2}
"""Of grouped queries, for each size: fewer than the ranks of two of them, which repeat heads then."""
METHODS = ("gather", "ulysses", "ring", "ulysses_ring")
EXTRAS = ("grouped queries", "packed", "tp", "zero1", "ep", "ac", "accumulation")
SHARDS = {"zero1": "zero1"}


@dataclass(frozen=True)
class Context:
    """A size, a method, and what is beside them."""

    size: int
    method: str
    extras: frozenset[str]
    data_ranks: int = 1

    def __str__(self) -> str:
        data = (f"dp{self.data_ranks}",) if self.data_ranks > 1 else ()
        return ", ".join((f"cp{self.size}", self.method, *data, *(one for one in EXTRAS if one in self.extras)))

    @property
    def world(self) -> int:
        return self.size * self.data_ranks * (2 if "tp" in self.extras else 1)

    @property
    def possible(self) -> bool:
        """Two and three ranks have no divisor for two ways at once."""
        return self.method != "ulysses_ring" or self.size == 4

    def request(self, file: Path, plugins: Sequence[str] = (), **settings: Any) -> Request:
        """What `forge verify` is asked for it, with more plugins and settings."""
        extras, each = self.extras, BATCH // self.data_ranks
        found = ["zero1" if "zero1" in extras else "fsdp2", *plugins]
        found += [] if any(one.startswith("context_sabotage:") for one in plugins) else ["cp"]
        found += self._kernel
        found += [one for one in ("tp", "ac") if one in extras] + (["moe", "ep"] if "ep" in extras else [])
        asked = {
            **self._model,
            "parallel.cp": self.size,
            "cp.method": self.method,
            "train.micro_batch": each // 3 if "accumulation" in extras else each,
        }
        asked |= {"parallel.tp": 2} if "tp" in extras else {}
        asked |= {"parallel.ep": 3 if self.size == 3 else 2} if "ep" in extras else {}
        asked |= {"ac.mode": "full"} if "ac" in extras else {}
        return compositions._request(file, found, asked | settings)

    def reference(self, file: Path, **settings: Any) -> Request:
        """The same model and data in one process, with more settings of the model."""
        plugins = [*self._kernel, *(["moe"] if "ep" in self.extras else [])]
        return compositions._request(file, plugins, {**self._model, "train.micro_batch": BATCH} | settings)

    @property
    def _kernel(self) -> list[str]:
        """One that can compute blocks."""
        return ["flex"] if "ring" in self.method else []

    @property
    def _model(self) -> dict[str, Any]:
        model = dict(MODEL)
        if "grouped queries" in self.extras:
            model["decoder.kv_heads"] = KEY_HEADS[self.size] * (2 if "tp" in self.extras else 1)
        if "packed" in self.extras:
            model["text.isolate"] = True
        if "tp" in self.extras and self.size == 4:
            model["decoder.heads"] = 24  # that both axes can share out
        if "ep" in self.extras:
            model |= {"moe.experts": 6, "moe.hidden": 16, "moe.bias_speed": 0.01, "moe.balance": 0.1}
        return model


def product(sizes: Sequence[int] = (2, 3, 4), methods: Sequence[str] = METHODS) -> Iterator[Context]:
    """Every size and method with each extra alone, with none, and with all that go together."""
    for size, method in itertools.product(sizes, methods):
        for extras in (frozenset[str](), *(frozenset({one}) for one in EXTRAS), frozenset(EXTRAS)):
            if (one := Context(size, method, extras)).possible:
                yield one
        yield from (one for one in [Context(size, method, frozenset(), 2)] if one.possible)


def covering(seed: int = compositions.SEED) -> list[Context]:
    """Few contexts in which every size and method meet, and each of both every extra: present and absent, and every two
    extras as far as they go together. With tensor parallelism on two sizes of context only, as ranks are few."""
    chance = random.Random(seed)
    able = [
        one
        for size, method in itertools.product((2, 3, 4), METHODS)
        for count in range(len(EXTRAS) + 1)
        for extras in itertools.combinations(EXTRAS, count)
        if (one := Context(size, method, frozenset(extras))).possible and one.world <= 4
    ]
    chance.shuffle(able)
    missing = set[Any]().union(*map(_pairs, able))
    found = []
    while missing:
        found.append(max(able, key=lambda one: len(_pairs(one) & missing)))
        missing -= _pairs(found[-1])
    return sorted(found, key=lambda one: (one.world, one.size, one.method))


def values(one: Context) -> list[tuple[str, Any]]:
    """Each factor of a context with its value."""
    return [("size", one.size), ("method", one.method), *((extra, extra in one.extras) for extra in EXTRAS)]


def cost(one: Context) -> float:
    """About how long a context takes, in seconds."""
    return 3 + one.world * (2 if "ep" in one.extras else 1)


def _pairs(one: Context) -> set[Any]:
    return set(itertools.combinations(values(one), 2))
