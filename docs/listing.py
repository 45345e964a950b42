"""The directory of plugins: Forge's own, and those whose reports lie in `docs/directory/`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forge_train.base.strict_json import dumps
from forge_train.registry.discovery import DISTRIBUTION, discover
from forge_train_cli.directory import dotted_api, entry, read_report
from forge_train_cli.roles import ROLES

REPORTS = Path(__file__).parent / "directory"
"""Reports of `forge plugins check --report`, a file for each distribution."""


def entries(reports: Path = REPORTS) -> list[dict[str, Any]]:
    """Every entry, without importing a plugin.

    Raises:
        ConfigError: for a report that is none.
        ValueError: for a report of a plugin that fails, has no distribution, or is listed already.
    """
    found = [entry(ref, []) for ref in discover() if ref.distribution == DISTRIBUTION]
    for file in sorted(reports.glob("*.json")):
        for one in read_report(file):
            if not one["checked"]["passed"] or not one["version"]:
                raise ValueError(f"{file}: {one['name']} must conform, and be part of a distribution.")
            if any((one["distribution"], one["name"]) == (other["distribution"], other["name"]) for other in found):
                raise ValueError(f"{file}: {one['name']} of {one['distribution']} is listed already.")
            found.append(one)
    return sorted(found, key=lambda one: (one["name"], one["distribution"]))


def as_json() -> str:
    """The directory as `forge plugins search` reads it, an entry a line."""
    return "[\n" + ",\n".join(dumps(one) for one in entries()) + "\n]\n"


def page() -> str:
    """The directory as tables, one for each role."""
    found = entries()
    parts = []
    for role in ROLES:
        if ones := [one for one in found if one["role"] == role]:
            head = ["| plugin | what it does | hooks | axes | facts | API | release | checked with |", "|---" * 8 + "|"]
            parts += [f"## {role.capitalize()}", "\n".join([*head, *map(_row, ones)])]
    return "\n\n".join(parts)


def _row(one: dict[str, Any]) -> str:
    own = one["distribution"] == DISTRIBUTION
    name = f"[`{one['name']}`](plugins/{one['name']}.md)" if own else f"`{one['name']}`"
    checked = one["checked"]
    cells = (
        name,
        one["summary"].replace("|", "\\|"),
        *(", ".join(f"`{word}`" for word in one[key]) for key in ("hooks", "axes", "facts")),
        dotted_api(one["api"] or ()),
        f"{one['distribution']} {one['version']}",
        f"Forge {checked['forge']}, API {dotted_api(checked['api'])}",
    )
    return f"| {' | '.join(cells)} |"
