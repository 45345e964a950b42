"""`forge plan --search`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forge_train.base.errors import ConfigError
from forge_train.base.format import format_bytes
from forge_train.base.strict_json import dumps
from forge_train_kit.format import format_column, format_count, format_seconds

from . import screen

if TYPE_CHECKING:
    from forge_train.registry.setup import Setup
    from forge_train_tools.configuration.request import Request
    from forge_train_tools.searching.search import Search
    from forge_train_tools.searching.space import Found

SHOWN = 8
"""Layouts of the front, and losers, that the screen shows."""


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a search to `forge plan`."""
    positive = click.FloatRange(min=0, min_open=True)
    for option in (
        click.option("--price", type=click.FloatRange(min=0), metavar="X",
                     help="With --tokens: price of a device for an hour."),
        click.option("--tokens", type=positive, metavar="N", help="With --search: cost of N tokens."),
        click.option("--rehearse", default=1, show_default=True, type=click.IntRange(min=0), metavar="K",
                     help="With --search: rehearse the K best layouts, which tells their memory exactly."),
        click.option("--write", metavar="FILE", help="With --search: write a configuration with the best layout."),
        click.option("--cluster", metavar="FILE",
                     help="With --search: devices and links from a TOML file, not --device."),
        click.option("--search", is_flag=True, help="Rank every layout that N ranks can have, and choose one."),
    ):  # fmt: skip
        command = option(command)
    return command


def wanted(options: dict[str, Any], others: Mapping[str, object]) -> bool:
    """Take `--search` out of its options, and say whether it was given.

    Raises:
        ConfigError: for options that have no effect without it, or with it.
    """
    if options.pop("search"):
        if given := [name for name, value in others.items() if value]:
            raise ConfigError(f"--{given[0]} is of no use with --search; leave it out.")
        return True
    if given := [name for name in ("cluster", "write", "tokens", "price") if options[name] is not None]:
        raise ConfigError(f"--{given[0]} is of use with --search only; add --search, or leave it out.")
    return False


def run(
    request: Request, world: int, device: str | None, cluster: str | None, write: str | None, rehearse: int,
    tokens: float | None, price: float | None, *, as_json: bool,
) -> None:  # fmt: skip
    """Search, rehearse the best, show them, and write a configuration."""
    from forge_train_tools.planning.clusters import cluster as of
    from forge_train_tools.searching.search import nothing_fits, search

    if (device is None) == (cluster is None):
        raise ConfigError("--search needs either --device NAME or --cluster FILE, for memory, peaks and links.")
    if cluster is not None and not Path(cluster).is_file():
        raise ConfigError(f"There is no cluster file {cluster}.")
    if price is not None and tokens is None:
        raise ConfigError("--price needs --tokens N, the tokens that are to be paid for.")
    for option, value in (("tokens", tokens), ("price", price)):
        if value is not None and not math.isfinite(value):
            raise ConfigError(f"--{option} must be a finite number, found {value}.")
    if write and Path(write).exists():
        raise ConfigError(f"{write} exists; name another file.")
    found = search(request, world=world, cluster=of(str(Path(cluster).resolve()) if cluster else device or ""))
    if not found.ranked:
        raise nothing_fits(found)
    setups = _rehearse(found, rehearse)
    if not found.ranked:
        raise nothing_fits(found)
    if write:
        _write(found, setups, Path(write))
    if as_json:
        click.echo(dumps(_as_json(found, tokens, price), indent=1))
    else:
        _show(found, world, tokens, price)
        if write:
            click.echo(f"Wrote {write}.")


def _rehearse(found: Search, count: int) -> dict[str, Setup]:
    """Plan the best layouts as `forge plan` does: those that do not fit after all are left out."""
    from forge_train_tools.planning import plan
    from forge_train_tools.searching.search import Large, chosen, setup_of

    done: dict[str, Setup] = {}
    while len(done) < min(count, len(found.ranked)):
        one = found.ranked[len(done)]
        setup = setup_of(chosen(found.request, one.candidate), found.world)
        made = plan(setup, world=found.world, nodes=0, device=None, on_cuda=True)
        peak = made.memory.peak
        exact = one if peak is None else replace(one, memory=replace(one.memory, peak=float(peak)), exact=True)
        fits = exact.memory.peak <= found.cluster.memory
        found.ranked[len(done)] = exact
        if fits:
            done[str(one.candidate)] = setup
        else:
            found.ranked.remove(exact)
            found.too_large += 1
            if found.nearest is None or exact.memory.peak < found.nearest.peak:
                found.nearest = Large(one.candidate, exact.memory.peak)
    return done


def _write(found: Search, setups: dict[str, Setup], file: Path) -> None:
    from forge_train.loop.describe import to_toml
    from forge_train_tools.searching.search import chosen, setup_of

    best = found.ranked[0]
    setup = setups.get(str(best.candidate)) or setup_of(chosen(found.request, best.candidate), found.world)
    where = f"{found.world} × {found.cluster.name}"
    head = f"# The best layout of {where} that `forge plan --search` found: {best.candidate}.\n"
    screen.write(file, head + to_toml(setup.config, setup.hooks))


def _hours(found: Search, one: Found, tokens: float) -> float:
    """Hours of all devices together."""
    return found.world * tokens / one.tokens_per_second / 3600


def _as_json(found: Search, tokens: float | None, price: float | None) -> dict[str, Any]:
    best = found.ranked[0]
    from forge_train_tools.searching.search import why_slower

    front = {id(one) for one in found.front}
    layouts = [
        {
            "parallel": one.candidate.sizes,
            "micro_batch": one.candidate.micro_batch,
            "accumulation": one.candidate.accumulation,
            "choices": str(one.candidate.variant),
            "tokens_per_second": one.tokens_per_second,
            "memory": one.memory.peak,
            "exact": one.exact,
            "mfu": one.mfu,
            "bubble": one.speed.bubble,
            "traffic": dict(one.speed.traffic),
            "bound": one.speed.bound,
            "front": id(one) in front,
            "reason": "" if one is best else why_slower(one, best),
            "device_hours": None if tokens is None else _hours(found, one, tokens),
            "price": None if tokens is None or price is None else price * _hours(found, one, tokens),
        }
        for one in found.ranked
    ]
    return {
        "cluster": found.cluster.name,
        "world": found.world,
        "legal": len(found.ranked),
        "layouts": layouts,
        "too_large": found.too_large,
        "refused": dict(found.refused),
        "unchecked": found.unchecked,
        "unvaried": list(found.unvaried),
        "notes": list(found.notes),
    }


def _show(found: Search, world: int, tokens: float | None, price: float | None) -> None:
    from forge_train_tools.searching.search import why_slower

    screen.line(f"{len(found.ranked):,} layouts of {world:,} × {found.cluster.name} that fit", "bold")
    screen.line(
        f"  by closed forms, with matrix products at {found.cluster.efficiency:.0%} of the peak; a real step differs"
    )
    _table("The front: none is faster with less memory", found, found.front[:SHOWN])
    best = found.ranked[0]
    screen.heading("Why others lost")
    shown = found.ranked[1 : SHOWN + 1]
    screen.table(("", ""), [(str(one.candidate), why_slower(one, best)) for one in shown])
    counts: Counter[str] = Counter(dict(found.refused))
    if found.too_large:
        counts["more memory than a device has"] = found.too_large
    if found.unchecked:
        counts["slower or larger, and not checked"] = found.unchecked
    if counts:
        screen.table(("layouts", "left out"), [(f"{n:,}", reason) for reason, n in counts.most_common()], right=(0,))
    if tokens is not None:
        hours = _hours(found, best, tokens)
        cost = "" if price is None else f", {price * hours:,.0f} at {price:g} an hour"
        screen.heading("Cost")
        days = format_seconds(tokens / best.tokens_per_second)
        screen.line(f"  {format_count(tokens)} tokens take {hours:,.0f} device hours{cost}: {days} on all of them")
    screen.heading("Not varied")
    screen.line(f"  {', '.join(found.unvaried) or 'nothing'}; whatever the configuration sets beside the layout")
    for note in found.notes:
        screen.line(f"  {note}", "yellow")


def _table(title: str, found: Search, rows: list[Found]) -> None:
    screen.heading(title)
    sizes = format_column([int(one.memory.peak) for one in rows])
    levels = [link.level for link in found.cluster.links]
    screen.table(
        ("layout", "tokens/s", "MFU", "memory", "bubble", *(f"sent: {level}" for level in levels), "bound"),
        [
            (
                str(one.candidate),
                format_count(one.tokens_per_second),
                "–" if one.mfu is None else f"{one.mfu:.0%}",
                size + ("" if one.exact else " ≈"),
                f"{one.speed.bubble:.0%}",
                *(format_bytes(int(sent)) for _, sent in one.speed.traffic),
                one.speed.bound,
            )
            for one, size in zip(rows, sizes, strict=True)
        ],
        right=tuple(range(1, 5 + len(levels))),
    )
