"""Clusters as data: devices, their memory and peaks, and the links between them, from a TOML file or by a name."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from forge_train.base.errors import ConfigError, describe, nearest

FOLDER = Path(__file__).parent / "clusters"


KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
"""Kinds of collectives that may have rates of their own."""
RINGS = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"}
"""Kinds that run in rings: as many as a node has ranks of the group, each of which leaves the node once, through an
adapter of its own (NCCL, src/graph/search.cc)."""


def steps(kind: str, ranks: int) -> int:
    """Steps of a ring, each of which takes the latency."""
    return 1 if kind == "send" else (2 if kind == "all_reduce" else 1) * (ranks - 1)


@dataclass(frozen=True)
class Rate:
    """Speed of a link."""

    bandwidth: float
    """Bytes/s of one device, in one direction."""
    latency: float
    """Seconds of one step of a collective."""

    def seconds(self, sent: float, steps: float) -> float:
        """The time in which a rank sends so many bytes in so many steps."""
        return sent / self.bandwidth + steps * self.latency


@dataclass(frozen=True)
class Link:
    """A level of the network. Ranks that lie in one block of `ranks` neighbours reach each other over it."""

    level: str
    bandwidth: float
    """Bytes/s of one device, in one direction."""
    latency: float
    """Seconds of one step of a collective."""
    ranks: int = 0
    """Ranks of a block; 0 for all of them, at the last level."""
    measured: Mapping[str, Rate] = field(default_factory=dict)
    """Kind of collective → its own rate, where `forge bench collectives` measured it."""

    def seconds(self, kind: str, sent: float, ranks: int, calls: float) -> float:
        """The time of some collectives of one kind.

        Args:
            kind: one of `planning.communication`.
            sent: bytes that a rank sends in all of them.
            ranks: of a group.
            calls: how many they are.
        """
        rate = self.measured.get(kind) or Rate(self.bandwidth, self.latency)
        return rate.seconds(sent, calls * steps(kind, ranks))


@dataclass(frozen=True)
class Cluster:
    """A kind of device, and how many of it are connected."""

    name: str
    devices: int
    """Of a node."""
    memory: float
    """Bytes of a device: of 10⁹ to the GB, as what the driver and the allocator keep for themselves is about the
    difference to GiB."""
    bandwidth: float
    """Of its memory, in bytes/s."""
    efficiency: float
    """Share of the peak that matrix products reach."""
    peak: Mapping[str, float]
    """dtype → dense FLOP/s; torch multiplies in fp32 outside of tensor cores unless told otherwise."""
    links: tuple[Link, ...]
    """From the fastest level to the slowest."""
    launch: float = 0.0
    """Seconds of a kernel beside its work: to find and begin it."""
    hides: bool = True
    """True if kernels run beside the host that launches them, and beside collectives of other layers: a CPU does all of
    it itself, one after the other."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Number → where it comes from."""

    def flops(self, precision: str) -> float:
        """The peak in a precision of `train.precision`.

        Raises:
            ConfigError: if the file does not say it.
        """
        key = "bf16" if precision == "fp16" and "fp16" not in self.peak else precision
        if key not in self.peak:
            raise ConfigError(
                f"Cluster {self.name!r}: [peak] has no {key}; add its FLOP/s, or train in another precision."
            )
        return self.peak[key]

    def near(self, span: int, ranks: int) -> tuple[int, ...]:
        """Ranks of a group that share a block of each level but the last.

        Args:
            span: as `link` takes it.
            ranks: of the group, equally far from each other.
        """
        apart = max(span // ranks, 1)
        inside = [one.ranks for one in self.links[: self.links.index(self.link(span))]]
        return tuple(max(min(size // apart, ranks), 1) for size in inside)

    def seconds(self, kind: str, sent: float, ranks: int, calls: float, near: Sequence[int]) -> float:
        """The time of some collectives of one kind. A ring has the bandwidth of all adapters that its group can use.

        Args:
            kind: one of `planning.communication`.
            sent: bytes that a rank sends in all of them.
            ranks: of a group.
            calls: how many they are.
            near: ranks of the group that share a block of each level below the slowest that it needs.
        """
        link = self.links[len(near)]
        if kind in link.measured or kind not in RINGS:
            return link.seconds(kind, sent, ranks, calls)
        sizes = (1, *near)
        levels = self.links[: len(sizes)]
        bandwidth = min(level.bandwidth * size for level, size in zip(levels, sizes, strict=True))
        hops = [ranks / size - ranks / larger for size, larger in pairwise((*sizes, ranks))]
        latency = sum(level.latency * count for level, count in zip(levels, hops, strict=True))
        return sent / bandwidth + calls * latency * steps(kind, ranks) / max(ranks - 1, 1)

    def link(self, span: int) -> Link:
        """The link that a group of ranks needs.

        Args:
            span: ranks from the first of the group to the last, and both of them; the group begins at a multiple of it.
        """
        return next(
            (one for one in self.links if one.ranks and span <= one.ranks and not one.ranks % span), self.links[-1]
        )


def names() -> list[str]:
    """The clusters that come with Forge."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def cluster(name: str) -> Cluster:
    """A cluster by its name, or by its file.

    Raises:
        ConfigError: if there is none, or it has holes.
    """
    if name.endswith(".toml"):
        return _read(Path(name))
    if name.lower() not in names():
        raise ConfigError(f"There is no data sheet of a device {name!r}.{nearest(name, names())}")
    return _read(FOLDER / f"{name.lower()}.toml")


@cache
def _read(file: Path) -> Cluster:
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: the cluster file can't be read: {error.strerror or error}.") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file}: the cluster file can't be read: {describe(error)}.") from error
    if holes := list(_holes(data)):
        raise ConfigError(f"{file}: {', '.join(holes)} {'is' if len(holes) == 1 else 'are'} missing.")
    links = data.pop("links", None)
    if not isinstance(links, list) or not links or not all(isinstance(one, dict) for one in links):
        raise ConfigError(f"{file}: a cluster needs one [[links]] or more, the fastest level first.")
    made = [_link(one, f"{file}: links.{one.get('level', at)}") for at, one in enumerate(links)]
    for at, link in enumerate(made):
        last = at == len(made) - 1
        if bool(link.ranks) == last:
            need = "must have no ranks, as it connects all" if last else "needs ranks, the size of its blocks"
            raise ConfigError(f"{file}: links.{link.level} {need}.")
        if at and not last and link.ranks <= made[at - 1].ranks:
            raise ConfigError(f"{file}: links.{link.level} must connect more ranks than the level before it.")
    found: Cluster = _fields(Cluster, {**data, "links": tuple(made)}, str(file))
    for key, value in found.peak.items():
        _check(file, f"peak.{key}", value)
    if not found.peak:
        raise ConfigError(f"{file}: [peak] is empty; give the FLOP/s of a dtype, such as bf16.")
    if found.efficiency > 1:
        raise ConfigError(f"{file}: efficiency is a share of the peak, at most 1; it is {found.efficiency:g}.")
    return found


def _holes(data: Mapping[str, Any]) -> Iterator[str]:
    """Every key that a cluster needs and a file lacks."""
    links = data.get("links")
    tables: list[tuple[str, type, Mapping[str, Any]]] = [("", Cluster, {"links": (), **data})]
    if isinstance(links, list) and all(isinstance(one, dict) for one in links):
        tables += [(f"links.{one.get('level', at)}.", Link, one) for at, one in enumerate(links)]
    for where, cls, table in tables:
        yield from (f"{where}{name}" for name in _needed(cls) if name not in table)
    if not links:
        yield "[[links]], the fastest level first,"


def _needed(cls: type) -> list[str]:
    fields = dataclasses.fields(cls)
    return [one.name for one in fields if one.default is one.default_factory is dataclasses.MISSING]


def _link(given: Mapping[str, Any], where: str) -> Link:
    link: Link = _fields(Link, given, where)
    rates = {}
    for kind, rate in link.measured.items():
        if kind not in KINDS:
            raise ConfigError(f"{where}: there is no collective {kind!r}.{nearest(kind, KINDS)}")
        if not isinstance(rate, dict):
            raise ConfigError(f"{where}: measured.{kind} must be a table, found {rate!r}.")
        rates[kind] = _fields(Rate, rate, f"{where}.measured.{kind}")
    return dataclasses.replace(link, measured=rates)


def _fields(cls: type, given: Mapping[str, Any], where: str) -> Any:
    """A dataclass from a table, with one sentence for what is missing, unknown or no number.

    Raises:
        ConfigError: for any of these.
    """
    fields = {one.name: one for one in dataclasses.fields(cls)}
    if lacking := [name for name in _needed(cls) if name not in given]:
        raise ConfigError(f"{where}: {', '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} missing.")
    for key, value in given.items():
        if key not in fields:
            raise ConfigError(f"{where}: there is no {key!r}.{nearest(key, fields)}")
        if fields[key].type in ("int", "float"):
            _check(where, key, value, whole=fields[key].type == "int")
        elif not isinstance(value, wanted := _TYPES.get(str(fields[key].type), dict)):
            raise ConfigError(f"{where}: {key} must be {_WORDS.get(wanted, 'a table')}, found {value!r}.")
    return cls(**given)


_TYPES: Mapping[str, type] = {"str": str, "bool": bool, "tuple[Link, ...]": tuple}
_WORDS: Mapping[type, str] = {str: "a text", bool: "true or false"}


def _check(where: object, key: str, value: object, *, whole: bool = False) -> None:
    number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not number or not 0 < float(str(value)) < float("inf"):
        raise ConfigError(f"{where}: {key} must be a {'whole ' * whole}number above 0, found {value!r}.")
