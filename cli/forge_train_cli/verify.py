"""`forge verify`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import click

from forge_train.base.errors import ForgeError
from forge_train.base.strict_json import dumps
from forge_train_kit.format import sparkline
from forge_train_tools.configuration.request import Request
from forge_train_tools.messages import waiting

from . import screen
from .options import json_option, nproc_option, run_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forge_train_tools.verification import Check, Offender, Verdict

SHOWN = 8


@click.command(short_help="Show that a parallel layout computes what one process does.")
@run_options()
@nproc_option()
@click.option("--steps", default=5, show_default=True, type=click.IntRange(min=1), metavar="N", help="Steps to take.")
@click.option(
    "--against", metavar="KEY=VALUE", help="Compare another setting, like precision=bf16, instead of another layout."
)
@json_option
def verify(request: Request, nproc: int | None, steps: int, against: str | None, as_json: bool) -> int:
    """Take a few steps of CONFIG, at the peak of its learning rate, on one process and on N, from the same weights and
    data, and compare losses, gradients, updates by the optimizer, an evaluation, replicas, batches and
    checkpoints. The exit code is 0 if they agree, and 1 if they do not or if a tie leaves
    it open. Nothing is left behind but the log of a side that failed.

    \b
    forge verify --nproc 2                       the default layout of 2 processes
    forge verify --nproc 4 -p tp -s parallel.tp=2
    forge verify --against precision=bf16        another precision instead of another layout
    """
    try:
        with waiting("starting"):
            from forge_train_tools.verification import check_sides, verify_request

            check_sides(nproc, against)
            verdict = verify_request(request, nproc, steps=steps, against=against)
    except ForgeError as error:
        if as_json:
            click.echo(dumps({"agree": False, "checks": [], "error": str(error)}))
        raise
    if as_json:
        click.echo(dumps(verdict.as_json(), indent=1))
    else:
        _show(verdict)
    return 0 if verdict.agree else 1


def _show(verdict: Verdict) -> None:
    screen.line(verdict.title, "bold")
    rows = [
        (
            "✓" if check.ok else "✗",
            check.name,
            _number(check.worst),
            _number(check.tolerance),
            check.says,
            _where(check),
        )
        for check in verdict.checks
    ]
    screen.table(("", "", "worst", "allowed", "", ""), rows, right=(2, 3))
    screen.heading("Loss")
    one, other = verdict.sides
    losses = [(step, f"{a:.7g}", f"{b:.7g}", f"{b - a:+.1e}") for step, (a, b) in enumerate(verdict.losses, start=1)]
    shown = losses if len(losses) <= SHOWN else [*losses[: SHOWN - 1], losses[-1]]
    screen.table(("step", one, other, "difference"), shown, right=(0, 1, 2, 3))
    screen.line(f"  gap {sparkline([abs(b - a) for a, b in verdict.losses], 40)}", "dim")
    for title, offenders in (
        ("Gradients at step 1 that differ most", verdict.offenders),
        ("Gradients at a later step that differ most", () if verdict.offenders else verdict.later),
        ("Updates by the optimizer from the layout's gradients: the largest differences", verdict.updates),
    ):
        _show_offenders(title, offenders)
    screen.line("")
    if verdict.agree:
        screen.line("They agree.", "bold green")
    elif verdict.undecided:
        screen.line("Undecided: they agree in everything that could be compared.", "bold yellow")
    else:
        screen.line("They do not agree.", "bold red")
        screen.line(f"  These parts differ: {', '.join(check.name for check in verdict.checks if not check.ok)}.")
    for sentence in verdict.advice:
        screen.line(f"  {sentence}")


def _show_offenders(title: str, offenders: Sequence[Offender]) -> None:
    if not offenders:
        return
    screen.heading(title)
    worst = [(str(one), _number(one.error), f"{one.ratio:.4g}") for one in offenders[:SHOWN]]
    screen.table(("", "error", "ratio"), worst, right=(1, 2))
    if len(offenders) > SHOWN:
        screen.line(f"  … {len(offenders) - SHOWN} more", "dim")


def _where(check: Check) -> str:
    return "" if check.ok else check.where


def _number(value: float) -> str:
    return f"{value:.0f}" if math.isfinite(value) and value == int(value) else f"{value:.1e}"
