"""`forge presets`."""

from __future__ import annotations

import itertools
import math
import re
import textwrap
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from forge_train.base.strict_json import dumps
from forge_train_kit.format import format_count
from forge_train_tools.configuration.presets import presets as installed
from forge_train_tools.configuration.request import tiling_axes

from . import screen
from .options import json_option

BASE = "base"
MODELS = "Published models. Each needs its own tokenizer and your text: -s tokenizer.path=FOLDER -s text.path=TEXT"
LAST = 1000
"""The lesson of a preset that names none: after all others."""


@dataclass(frozen=True)
class Preset:
    """A preset, read as text."""

    name: str
    summary: str
    """The first line of its comment."""
    processes: int
    """The number of processes it is made for; 1 if it runs on any number."""
    device: str
    needs: str
    """Requirements, from its comment `# Needs: …`."""
    command: str
    file: str
    lesson: int
    """Its place in the suggested order of learning: `# Lesson N.`"""
    parameters: int = 0
    """Parameters of a published model: `# Parameters: N.` 0 for a small model that shows a technique."""
    hardware: str = ""
    """Hardware that it fits on, found with `forge plan`: `# Hardware: 8 h100.`, a number of devices and their name."""

    @property
    def wants(self) -> str:
        """Processes, device and other requirements, in a phrase."""
        if self.parameters:
            return f"{format_count(self.parameters).replace('G', 'B')} parameters; fits {self.hardware}" + (
                f"; {self.needs}" if self.needs else ""
            )
        several = f"{self.processes} process{'es' if self.processes > 1 else ''}"
        device = "" if self.device == "auto" else f", {self.device}"
        return f"{several}{device}" + (f"; {self.needs}" if self.needs else "")


def read(name: str, file: Path) -> Preset:
    """Read a preset's description of itself from its file."""
    text = file.read_text(encoding="utf-8")
    data = tomllib.loads(text)
    comment = re.match(r"(?:#.*\n)*", text)
    lines = [line.lstrip("# ").strip() for line in (comment[0] if comment else "").splitlines()]
    lesson = re.search(r"^# Lesson (\d+)\.$", text, re.MULTILINE)
    parameters = re.search(r"^# Parameters: ([\d,]+)\.$", text, re.MULTILINE)
    hardware = re.search(r"^# Hardware: (.+)\.$", text, re.MULTILINE)
    axes = tiling_axes()
    processes = math.prod(size for axis, size in data.get("parallel", {}).items() if axis in axes and size > 0)
    return Preset(
        name=name,
        summary=lines[0] if lines else "",
        processes=processes,
        device=data.get("run", {}).get("device", "auto"),
        needs=next((line.removeprefix("Needs: ") for line in lines if line.startswith("Needs: ")), ""),
        command=f"forge train {name}" + (f" --nproc {processes}" if processes > 1 and not parameters else ""),
        file=str(file),
        lesson=int(lesson[1]) if lesson else LAST,
        parameters=int(parameters[1].replace(",", "")) if parameters else 0,
        hardware=hardware[1] if hardware else "",
    )


def everything() -> list[Preset]:
    """All installed presets in the suggested order of learning, then published models by name."""
    found = [read(name, file) for name, file in installed().items() if name != BASE]
    return sorted(found, key=lambda one: (one.parameters > 0, one.lesson, one.name))


@click.command(short_help="List the presets, in the order to learn them.")
@json_option
def presets(as_json: bool) -> None:
    """List the presets: what each shows, what it needs, and the command that runs it.

    Presets of techniques come first, and train in seconds on CPU cores unless they say otherwise. Published
    models follow, with the recipe they were trained with. `forge config init NAME -o my.toml` writes a preset to a file
    for you to edit.
    """
    found = everything()
    if as_json:
        click.echo(dumps([asdict(one) for one in found], indent=1))
        return
    wide = max(len(one.command) for one in found)
    for published, ones in itertools.groupby(found, lambda one: one.parameters > 0):
        if published:
            click.echo("\n" + "\n".join(textwrap.wrap(MODELS, screen.width(), break_on_hyphens=False)))
        screen.listing([(one.command, f"{one.summary} ({one.wants})") for one in ones], wide)
