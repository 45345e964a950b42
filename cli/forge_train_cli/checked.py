"""The report of `forge plugins check --report`, and its badge."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from forge_train import __version__
from forge_train.base.errors import ConfigError
from forge_train.base.strict_json import dumps
from forge_train.plugin.plugin import API

from . import screen
from .directory import described, dotted_api

if TYPE_CHECKING:
    from forge_train_tools.testing import Report

LABEL = "Forge plugin API"
COLOURS = {True: "#2a6f3c", False: "#a3282d"}
"""Of a badge that says that all plugins conform, or not: white text on either has a contrast above 6."""


def writable(path: Path) -> Path:
    """The place of a report, before what it reports takes minutes.

    Raises:
        ConfigError: if no report could be written there.
    """
    if path.suffix != ".json":
        raise ConfigError(f"--report {path}: expected a file's name that ends in .json; the badge goes beside it.")
    if not path.parent.is_dir():
        raise ConfigError(f"--report {path}: there is no folder {path.parent}.")
    return path


def write_report(path: Path, reports: Sequence[Report]) -> Path:
    """Write a report as JSON, and beside it a badge, whose path is returned."""
    import torch

    passed = all(report.passed for report in reports)
    report = {
        "checked_with": {
            "forge": __version__,
            "api": list(API),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "passed": passed,
        "plugins": [
            {
                **described(one.ref),
                "passed": one.passed,
                "checks": dict(sorted(Counter(check.status for check in one.checks).items())),
                "failed": [check.name for check in one.of("fail")],
            }
            for one in reports
        ],
    }
    screen.write(path, f"{dumps(report, indent=1)}\n")
    badge_path = path.with_suffix(".svg")
    screen.write(badge_path, badge(LABEL, dotted_api(API) if passed else f"{dotted_api(API)} fails", good=passed))
    return badge_path


def badge(label: str, value: str, *, good: bool) -> str:
    """A badge as SVG, which loads nothing from elsewhere."""
    left, right = (round(6.6 * len(text)) + 14 for text in (label, value))
    texts = [
        f'<text x="{at}" y="14" textLength="{wide - 14}">{escape(text)}</text>'
        for at, wide, text in ((7, left, label), (left + 7, right, value))
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img">',
            f"<title>{escape(f'{label}: {value}')}</title>",
            f'<clipPath id="round"><rect width="{left + right}" height="20" rx="3"/></clipPath>',
            '<g clip-path="url(#round)">',
            f'<rect width="{left}" height="20" fill="#444"/>',
            f'<rect x="{left}" width="{right}" height="20" fill="{COLOURS[good]}"/>',
            "</g>",
            '<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">',
            *texts,
            "</g>",
            "</svg>\n",
        ]
    )
