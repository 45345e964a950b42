"""The forecast against the world: published measurements, and layouts of two small models on this machine.

    python benchmarks/forecast.py plan 4              rehearse the published rows that have not been, on 4 processes
    python benchmarks/forecast.py published           fit five constants on one half, and write results/forecast.md
    python benchmarks/forecast.py live 5              measure this machine, search, and time 32 layouts, 5 times each

`plan` keeps the numbers of each rehearsal in published/planned.json; delete the file to rehearse again. `live` writes
results/forecast-live.md.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median

import live
import torch
from forecasting import COUNT, Constants, Pair, fit, pairs
from published import GIB, Row, rows, sources
from rehearsing import everything, kept, of_rows

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


def against_here(rounds: int) -> None:
    """Measure this machine, search, time some of the layouts on two ranks, and write the page."""
    before = os.getloadavg()[0]
    torch_here = f"{platform.machine()}, {os.cpu_count()} cores, gloo, torch {torch.__version__}"
    text = f"""# The forecast of a search, against layouts on two ranks of one machine

`python benchmarks/forecast.py live {rounds}`: {torch_here}.

For each model, `forge bench collectives` measures this machine, `forge plan --search` ranks all layouts of two ranks,
and the best of them and {live.COUNT - 1} others, spread evenly over the ranking, take {rounds} steps each, beside
one that is not counted. Seconds are the least of these; CPU seconds are those of both ranks, halved. No constant of the
forecast is fitted to a step.

Goals: Kendall's τ of 0.8 or more, and a first choice within 5 % of the best.
"""
    lines = []
    for model, settings in live.MODELS.items():
        with tempfile.TemporaryDirectory() as name:
            live.measured(model, Path(name) / "here.toml")
            count, some = live.timed(model, Path(name) / "here.toml", rounds)
        forecast, wall, cpu = ([getattr(one, key) for one in some] for key in ("forecast", "wall", "cpu"))
        lost = [live.loss_of_pick(clock, forecast) for clock in (wall, cpu)]
        lines += [
            "",
            f"## {model}: {', '.join(settings)}",
            "",
            f"{count} layouts. Of those that were timed:",
            "",
            "| | by the wall | by CPU seconds |",
            "|---|---:|---:|",
            f"| Kendall's τ | {live.kendall(wall, forecast):.2f} | {live.kendall(cpu, forecast):.2f} |",
            f"| first choice slower than the best by | {lost[0]:.1%} | {lost[1]:.1%} |",
            "",
            "| layout | forecast | seconds | CPU seconds | error |",
            "|---|---:|---:|---:|---:|",
            *(
                f"| {one.layout} | {one.forecast:.3f} | {one.wall:.3f} | {one.cpu:.3f} "
                f"| {one.forecast / one.wall - 1:+.0%} |"
                for one in some
            ),
        ]
    load = f"The load of the machine was {before:.1f} before: seconds say little where it is above 2."
    (RESULTS / "forecast-live.md").write_text("\n".join([text + load, *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["plan"]:
        everything(rows(), int(sys.argv[2]))
    elif sys.argv[1:2] == ["live"]:
        against_here(int(sys.argv[2]))
    elif sys.argv[1:] == ["published"]:
        against_published()
    else:
        sys.exit(__doc__)
