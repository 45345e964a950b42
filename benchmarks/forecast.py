"""The forecast against the world: published measurements, and layouts of two small models on this machine.

    python benchmarks/forecast.py plan 4              rehearse the published rows that have not been, on 4 processes
    python benchmarks/forecast.py published           fit five constants on one half, and write results/forecast.md
    python benchmarks/forecast.py live 5 here.toml    time 26 layouts, 5 times each, and forecast them from a file
                                                      of `forge bench collectives wide.toml --nproc 2 --out here.toml`

`plan` keeps the numbers of each rehearsal in published/planned.json; delete the file to rehearse again. `live` writes
results/forecast-live.md.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median

import live
from forecasting import COUNT, Constants, Pair, fit, pairs, unhidden
from published import GIB, Row, rows, sources
from rehearsing import everything, kept, of_rows, rehearse

from forge_train_tools.planning.clusters import cluster

RESULTS = Path(__file__).parent / "results"


def page(every: list[Row], made: list[Pair], by: Constants, refused: Mapping[str, str]) -> str:
    """The page of published measurements."""
    halves = {
        "fitted": [one for one in made if one.row.fitted],
        "held out": [one for one in made if not one.row.fitted],
    }
    text = f"""# The forecast, against published measurements

`python benchmarks/forecast.py published`: {len(every)} measurements of {len(sources())} sources, of which
{len(made)} are forecast. `benchmarks/published` has them with repository, commit and file.

Each row is planned as `forge plan --device` plans it, with the layout, batches, recomputation, optimizer and loss
of the measurement, and Forge's own kernels and collectives. A step takes

    (products + attention + casts + memory + between + waited) × stretch + max(hidden − all work, 0)

- `products` at the rate of the device's fastest product times a constant, for the H200's, H100's and A100's rows;
  on the B200 at the mean rate of the models' own products, which the source of its rows measured. `attention` at
  the rate of FlashAttention-2, or of the kernel of that source, by sequence length. `published/devices.toml` has
  these rates with their sources. An H100 held to 500 W has a clock lower by the cube root.
- `casts` of float8: seven bytes for each element of what is multiplied. Products of layers are faster by the ratio
  of the fastest ones.
- `memory`: products and the optimizer that wait for it. `between` is everything between products as if nothing were
  fused, times a constant where a row's kernels are fused.
- `waited`: collectives along tp, cp and ep and messages between stages; `hidden`: those of data parallelism, and
  with async TP the others, too. A ring across nodes uses the adapters of all its ranks on a node (`forge plan` does
  the same).
- `stretch` of a pipeline.

Memory is the plan's peak, times a constant. Rows that differ in their number of micro-batches alone share one
rehearsal, in proportion.

**Calibration** fits {COUNT} constants on one half: products {by.products:.3f} of the fastest, {by.fused:.3f} of the
time between products left where they are fused, network {by.network:.3f}, memory {by.allocated:.3f} of allocated
and {by.reserved:.3f} of reserved bytes. A row is in that half if the SHA-256 of its source, model, device, devices,
cp, tp, pp, ep and precision is even: rows that differ in their batches alone are in one half.
"""
    lines = [
        text,
        "| half | rows | median error of time | within 10 % | rows with memory | median error of memory | within 3 % |",
        "|---|---:|---:|---:|---:|---:|---:|",
        *(_summary(name, some, by) for name, some in halves.items()),
        *(_summary(f"held out, {source}", some, by) for source, some in _by_source(halves["held out"]).items()),
        "",
        "The goals are 10 % and 3 %, at the median of the half that was held out.",
        "",
        "## Rows",
        "",
        "| row | half | devices | seconds | forecast | error | GiB | forecast | error |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
        *(_line(one, by) for one in made),
        "",
        "## Not forecast",
        "",
        "| row | why |",
        "|---|---|",
        *(f"| {name} | {why} |" for name, why in refused.items()),
        "",
        "## Sources",
        "",
        *(_source(name, one) for name, one in sources().items()),
        "",
    ]
    return "\n".join(lines)


def _by_source(some: Iterable[Pair]) -> dict[str, list[Pair]]:
    found: dict[str, list[Pair]] = {}
    for one in some:
        found.setdefault(one.row.source.split("-20")[0], []).append(one)
    return found


def _summary(name: str, some: list[Pair], by: Constants) -> str:
    times = [abs(one.time_error(by)) for one in some]
    memories = [abs(error) for one in some if (error := one.memory_error(by)) is not None]
    numbers = [str(len(some)), f"{median(times):.1%}", f"{sum(one <= 0.1 for one in times)}", str(len(memories))]
    numbers += [f"{median(memories):.1%}", f"{sum(one <= 0.03 for one in memories)}"] if memories else ["–", "–"]
    return f"| {name} | {' | '.join(numbers)} |"


def _line(one: Pair, by: Constants) -> str:
    row, error = one.row, one.memory_error(by)
    memory = ["–", "–", "–"]
    if row.memory_gib is not None and error is not None:
        memory = [f"{row.memory_gib:g}", f"{one.memory(by) / GIB:.1f}", f"{error:+.1%}"]
    cells = [
        row.name, "fitted" if row.fitted else "held out", f"{row.devices} {row.device}", f"{one.measured:.4g}",
        f"{one.seconds(by):.4g}", f"{one.time_error(by):+.1%}", *memory,
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _source(name: str, one: Mapping[str, object]) -> str:
    where = f"{one['repository']}, {one['file']}, {str(one['commit'])[:12]}" if "repository" in one else str(one["url"])
    note = f" {one['note']}" if "note" in one else ""
    return f"- `{name}`: {one['title']} ({where}). Memory is torch's {one['memory']} bytes.{note}"


def against_published() -> None:
    """Fit on one half, and write the page."""
    every = rows()
    plans = of_rows(every, kept())
    made = pairs(every, plans)
    refused = {row.name: _why(row, plans[row.name].error if row.name in plans else "") for row in every}
    refused = {name: why for name, why in refused.items() if name not in {one.row.name for one in made}}
    (RESULTS / "forecast.md").write_text(
        page(every, made, fit([one for one in made if one.row.fitted]), refused), "utf-8"
    )


def _why(row: Row, error: str) -> str:
    return row.missing or error or "not planned yet: `forecast.py plan`"


def against_here(rounds: int, file: str) -> None:
    """Time layouts on two ranks, forecast them from a measured cluster file, and write the page."""
    before = os.getloadavg()[0]
    found, on = live.timed(rounds), cluster(file)
    load = f"{before:.1f} before and {os.getloadavg()[0]:.1f} after the steps, on {os.cpu_count()} cores"
    text = f"""# The forecast, against layouts on two ranks of one machine

`python benchmarks/forecast.py live {rounds} FILE`: {platform.machine()}, {on.name}. Each layout takes {rounds} steps in
turn with the others, beside one that is not counted; seconds are the least of them. CPU seconds are those of both
ranks, halved. The forecast has no fitted constant: products at the measured efficiency, everything between them at the
measured bandwidth of memory, each collective at its measured rate, and nothing hidden.

The load of the machine was {load}: seconds and rates say little where it is above 2."""
    lines = [text]
    for model, layouts in found.items():
        forecast = {
            one: unhidden(rehearse(live.request(model, one), world=live.WORLD, nodes=1, device=file), on)
            for one in layouts
        }
        clocks = {clock: {one: layouts[one][clock] for one in layouts} for clock in ("wall", "cpu")}
        wall, cpu = (live.kendall(list(one.values()), list(forecast.values())) for one in clocks.values())
        lines += [
            "",
            f"## {model}: {', '.join(live.MODELS[model])}",
            "",
            f"Kendall's τ is {wall:.2f} by the wall and {cpu:.2f} by CPU seconds. The layout with the best forecast is",
            f"{live.loss_of_pick(clocks['wall'], forecast):.1%} slower than the best one by the wall,",
            f"{live.loss_of_pick(clocks['cpu'], forecast):.1%} by CPU seconds.",
            "",
            "| layout | seconds | CPU seconds | forecast | error |",
            "|---|---:|---:|---:|---:|",
            *(
                f"| {one} | {took['wall']:.3f} | {took['cpu'] / 2:.3f} | {forecast[one]:.3f} "
                f"| {forecast[one] / took['wall'] - 1:+.0%} |"
                for one, took in sorted(layouts.items(), key=lambda item: item[1]["wall"])
            ),
        ]
    (RESULTS / "forecast-live.md").write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["plan"]:
        everything(rows(), int(sys.argv[2]))
    elif sys.argv[1:2] == ["live"]:
        against_here(int(sys.argv[2]), sys.argv[3])
    elif sys.argv[1:] == ["published"]:
        against_published()
    else:
        sys.exit(__doc__)
