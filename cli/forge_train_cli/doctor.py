"""`forge doctor`."""

from __future__ import annotations

from pathlib import Path

import click

from forge_train.base.strict_json import dumps
from forge_train_tools.messages import waiting

from . import screen
from .options import json_option, nproc_option, run_dir_option

SIGNS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("✗", "red")}


@click.command(short_help="Check what this machine has and lacks.")
@run_dir_option
@nproc_option()
@json_option
def doctor(run_dir: str, nproc: int | None, as_json: bool) -> int:
    """Check everything that training needs on this machine. The exit code is 1 if training could not start.

    With --nproc, that many processes compute a product and an all-reduce with known results, and their times, clocks
    and devices are compared.
    """
    from rich.text import Text

    from .checkup import checkup

    with waiting("checking this machine"):
        checks = list(checkup(Path(run_dir), nproc))
    fine = all(check.status != "fail" for check in checks)
    if as_json:
        listed = [{"name": check.name, "status": check.status, "text": check.text} for check in checks]
        click.echo(dumps({"ok": fine, "checks": listed}, indent=1))
        return 0 if fine else 1
    rows = []
    for check in checks:
        sign, colour = SIGNS[check.status]
        rows.append((Text(sign, style=f"bold {colour}"), Text(check.name, style="dim"), check.text))
    screen.table(("", "", ""), rows, indent=0)
    if not fine:
        screen.line("\nTraining could not start here.", "bold red")
    return 0 if fine else 1
