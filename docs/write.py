"""Writes what the documentation takes from the code, so that it can be read in the repository too.

    python docs/write.py            lists, tables, the API reference, and a page for each built-in plugin
    python docs/write.py --all      also transcripts and pictures, from real runs: this takes minutes
    python docs/write.py --check    write nothing, name the stale pages, and exit 1 if there are any

A page says where a list goes: between `<!-- write: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

from forge_train.registry.discovery import load
from forge_train_cli.directory import FILE as DIRECTORY
from forge_train_cli.presets import Preset, everything

DOCS = Path(__file__).parent
sys.path.append(str(DOCS))

import listing  # noqa: E402  # beside this file
import lists  # noqa: E402
import pictures  # noqa: E402
import reference  # noqa: E402
import screen  # noqa: E402
import transcripts  # noqa: E402
import viewer  # noqa: E402

BLOCK = re.compile(r"(<!-- write: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def presets() -> str:
    """The presets of techniques that come with forge."""
    rows = ["| command | what it shows | needs |", "|---|---|---|"]
    rows += [f"| `{one.command}` | {one.summary} | {one.wants} |" for one in _own_presets() if not one.parameters]
    return "\n".join(rows)


def models() -> str:
    """The presets of published models."""
    rows = ["| preset | what it is | parameters | fits on |", "|---|---|---|---|"]
    found = [one for one in _own_presets() if one.parameters]
    rows += [f"| `{one.name}` | {one.summary} | {one.parameters:,} | {one.hardware} |" for one in found]
    return "\n".join(rows)


def _own_presets() -> list[Preset]:
    own = DOCS.parent / "plugins"
    return [one for one in everything() if Path(one.file).is_relative_to(own)]


PARTS: dict[str, Callable[[], str]] = {
    "api_kernel": reference.kernel,
    "api_kit": reference.kit,
    "api_tools": reference.tools,
    "directory": listing.page,
    "facts": lists.facts,
    "hooks": lists.hooks,
    "laws": lists.laws,
    "metrics": lists.metrics,
    "models": models,
    "modules": lists.modules,
    "plugins": lists.plugins,
    "presets": presets,
    "rooms": lists.rooms,
    "sections": lists.sections,
    "trackers": lists.trackers,
}


def written(page: str) -> str:
    """A page's text, with what it takes from the code."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{PARTS[found[2]]()}\n\n{found[3]}", page)


def stale() -> dict[Path, str]:
    """Pages that do not say what the code says → what they should be; the empty string for one that should not be."""
    folder = DOCS / "plugins"
    pages = {
        path: path.read_text(encoding="utf-8") for path in sorted([*DOCS.rglob("*.md"), DOCS.parent / "README.md"])
    }
    pages[DIRECTORY] = DIRECTORY.read_text(encoding="utf-8") if DIRECTORY.is_file() else ""
    wanted = {path: written(text) for path, text in pages.items() if path.parent != folder or path.stem == "index"}
    wanted |= {folder / f"{found.name}.md": lists.plugin_page(found, load(found)) for found in lists.builtin()}
    wanted[DIRECTORY] = listing.as_json()
    found = {path: text for path, text in wanted.items() if pages.get(path) != text}
    return found | dict.fromkeys(pages.keys() - wanted.keys(), "")


def missing() -> set[str]:
    """Entry points of `pyproject.toml` that the installed metadata lacks: pages would be written without them."""
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))
    groups = project["project"]["entry-points"]
    wanted = {(group, *point) for group, points in groups.items() for point in points.items()}
    installed = {(one.group, one.name, one.value) for group in groups for one in entry_points(group=group)}
    return {f"{name} of {group}" for group, name, _ in wanted - installed}


def main() -> int:
    """Write, or check."""
    check = "--check" in sys.argv
    if lacking := sorted(missing()):
        print(f"The installed metadata lacks {', '.join(lacking)}: run `pip install --no-deps -e .` and try again.")
        return 1
    pages = stale()
    for page, text in pages.items():
        print(page.relative_to(DOCS.parent))
        if check:
            continue
        if text:
            page.write_text(text, encoding="utf-8")
        else:
            page.unlink()
    if "--all" in sys.argv:
        for name in transcripts.SESSIONS:
            page = DOCS / name
            page.write_text(transcripts.written(name, page.read_text(encoding="utf-8")), encoding="utf-8")
            print(page.relative_to(DOCS.parent))
        screen.TARGET.write_text(screen.picture(), encoding="utf-8")
        screen.shots()
        pictures.main()
        viewer.main()
    return 1 if pages and check else 0


if __name__ == "__main__":
    raise SystemExit(main())
