"""`forge bench`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from forge_train.base.format import format_bytes
from forge_train.base.strict_json import dumps
from forge_train_kit.format import format_count
from forge_train_tools.configuration.request import Request
from forge_train_tools.messages import waiting

from . import screen
from .lazy import LazyGroup
from .options import json_option, run_options

if TYPE_CHECKING:
    from forge_train_tools.bench import Measured

DEFAULT = "training"
COMMANDS = (("--version",), ("--help",), ("plugins", "list"))


class Benches(LazyGroup):
    """Measures training if no other command is named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        named = args and (args[0] in self.table or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if named else [DEFAULT, *args])


@click.group(
    cls=Benches,
    table={
        DEFAULT: (".bench:training", "Measure training; the default, which need not be named."),
        "collectives": (
            ".bench_collectives:collectives",
            "Measure collectives and products, and write a cluster file.",
        ),
    },
    short_help="Measure this machine.",
)
def bench() -> None:
    """Measure this machine. `forge bench CONFIG` measures training.

    \b
    forge bench llama3-1b
    forge bench collectives --nproc 4 --out here.toml
    """


@click.command(short_help="Measure training; the default, which need not be named.")
@run_options()
@click.option(
    "--turns",
    default=8,
    show_default=True,
    type=click.IntRange(min=1),
    metavar="N",
    help="How many times to run five steps of forge's loop and of the hand-written one.",
)
@json_option
def training(request: Request, turns: int, as_json: bool) -> None:
    """Train CONFIG for a few steps, and measure throughput, the overhead of forge's loop over a hand-written one, data,
    checkpoints and start-up. Nothing is left behind."""
    with waiting("measuring"):
        from forge_train_tools.bench import measure, start_up

        measured = measure(request, turns=turns)
        commands = [[sys.executable, "-m", "forge_train_cli", *arguments] for arguments in COMMANDS]
        ratios = {" ".join(("forge", *words)): ratio for words, ratio in zip(COMMANDS, start_up(commands), strict=True)}
    if as_json:
        click.echo(dumps({**measured.as_json(), "start_up": ratios}, indent=1))
        return
    _show(measured, ratios)


def _show(measured: Measured, ratios: dict[str, float]) -> None:
    rows: list[tuple[str, str, str]] = [
        (
            "throughput",
            f"{format_count(measured.tokens_per_second)} tokens/s",
            f"{format_count(measured.parameters)} parameters",
        ),
        *_flops(measured),
        ("loop", f"{measured.speed:.3f}", f"of a hand-written loop's tokens per {_second(measured)}"),
        ("data", f"{format_count(measured.data_tokens_per_second)} tokens/s", "from the loader alone"),
        (
            "checkpoint",
            f"{measured.save_seconds:.3f} s",
            f"to save and verify {format_bytes(measured.checkpoint_bytes)}",
        ),
        ("", f"{measured.load_seconds:.3f} s", "to load"),
        *((command, f"{ratio:.1f} ×", "the CPU time of python -c pass") for command, ratio in ratios.items()),
    ]
    screen.table(("", "", ""), rows, right=(1,), indent=0)


def _second(measured: Measured) -> str:
    return "CPU-second" if measured.clock == "CPU" else "second"


def _flops(measured: Measured) -> list[tuple[str, str, str]]:
    share: Any = measured.share_of_matmul
    if share is None:
        return []
    reached = share * measured.matmul_flops
    rows = [
        (
            "",
            f"{format_count(reached)}FLOP/s",
            f"{share:.0%} of a large matrix product's {format_count(measured.matmul_flops)}FLOP/s",
        )
    ]
    if (mfu := measured.mfu) is not None:
        rows.append(("", f"{mfu:.1%}", f"MFU, of the device's {format_count(measured.peak_flops)}FLOP/s"))
    return rows
