"""The directory of plugins, made of metadata and source without importing any, and `forge plugins search`."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from forge_train.base.errors import ConfigError, nearest
from forge_train.base.names import PluginRef, folder, is_file, locate
from forge_train.base.strict_json import dumps
from forge_train.mesh.axes import CONFIGURED
from forge_train.plugin.plugin import API
from forge_train.registry.discovery import DISTRIBUTION, discover, own_version
from forge_train_kit.axes import installed as installed_axes
from forge_train_kit.covering import covers
from forge_train_kit.source import Source
from forge_train_tools.hook_table import implements, lineage

from . import screen
from .options import json_option
from .roles import role

FILE = Path(__file__).with_name("plugins.json")
"""The directory as it was when this Forge was released; docs/write.py writes it."""
REPORT = "forge-plugin.json"
"""Name of the report that a distribution ships: in its package, or, with the module's name before it, beside its
module."""
KEYS = ("name", "role", "summary", "hooks", "axes", "facts", "api", "distribution", "version", "checked")
"""Keys of an entry."""


@click.command(short_help="Search the directory of plugins, and those installed.")
@click.argument("words", nargs=-1, required=True, metavar="WORD...")
@json_option
def search(words: tuple[str, ...], as_json: bool) -> None:
    """Find plugins by name, role, summary, hook, axis, fact or distribution. Every WORD must occur.

    The directory comes with Forge, and installed plugins are added to it; nothing is imported or downloaded.
    """
    problems: list[str] = []
    everything = entries(problems)
    found = matching(everything, words)
    for problem in problems:
        click.echo(problem, err=True)
    if as_json:
        click.echo(dumps(found, indent=1))
        return
    if not found:
        hint = nearest(" ".join(words), [one["name"] for one in everything])
        click.echo(f"No plugin has {' and '.join(map(repr, words))}.{hint}", err=True)
        return
    rows = [(one["name"], f"{one['summary']} ({_about(one)})") for one in found]
    screen.listing(rows, max(len(name) for name, _ in rows))
    absent = sorted({one["distribution"] for one in found if not one["installed"]})
    if absent:
        click.echo(f"\nInstall with: forge plugins install {' '.join(absent)}")


def _about(one: dict[str, Any]) -> str:
    parts = [one["role"], f"{one['distribution']} {one['version']}".strip(), checked_words(one)]
    return ", ".join(filter(None, [*parts, "" if one["installed"] else "not installed"]))


def checked_words(one: dict[str, Any]) -> str:
    """The version of Forge and the plugin API that a plugin was checked with, in words; empty if it was not."""
    if not (checked := one["checked"]):
        return ""
    words = f"checked with Forge {checked['forge']}, API {dotted_api(checked['api'])}"
    words += f" at version {checked['version']}" if checked["version"] != one["version"] else ""
    return words if checked["passed"] else f"{words}: it fails"


def dotted_api(api: Iterable[int]) -> str:
    return ".".join(map(str, api))


def matching(everything: Iterable[dict[str, Any]], words: Iterable[str]) -> list[dict[str, Any]]:
    """Entries in which every word occurs; those with it in their names first."""
    wanted = [word.lower().replace("-", "_") for word in words]
    keys = ("name", "role", "summary", "hooks", "axes", "facts", "distribution")
    texts = [(one, json.dumps([one[key] for key in keys], ensure_ascii=False)) for one in everything]
    found = [one for one, text in texts if all(word in text.lower().replace("-", "_") for word in wanted)]
    return sorted(found, key=lambda one: (one["name"] not in wanted, not _in_name(one, wanted), one["name"]))


def _in_name(one: dict[str, Any], wanted: Iterable[str]) -> bool:
    return any(word in one["name"] for word in wanted)


def entries(problems: list[str]) -> list[dict[str, Any]]:
    """Every plugin of the directory and every installed one, each with whether it is installed.

    Args:
        problems: gets a sentence for each report that can't be read.
    """
    listed = {(one["distribution"], one["name"], one["version"]): one for one in json.loads(FILE.read_text("utf-8"))}
    installed = {(ref.distribution, ref.name): ref for ref in discover()}
    found = [{**one, "installed": False} for key, one in listed.items() if key[:2] not in installed]
    for ref in installed.values():
        known = listed.get((ref.distribution, ref.name, ref.version))  # reading its source takes longer
        found.append({**(known or entry(ref, problems)), "installed": True})
    return sorted(found, key=lambda one: (one["name"], one["distribution"]))


def entry(ref: PluginRef, problems: list[str]) -> dict[str, Any]:
    """An entry: metadata, source, and the report that the distribution ships."""
    return {**described(ref), "checked": _checked(ref, problems)}


def described(ref: PluginRef) -> dict[str, Any]:
    """A plugin as its metadata and source describe it."""
    facts, api = _stated(ref)
    return {
        "name": ref.name,
        "role": role(ref),
        "summary": Source(ref).summary,
        "hooks": sorted(implements(ref)),
        "axes": sorted(covers(ref) & {*CONFIGURED, *installed_axes()}),
        "facts": facts,
        "api": api,
        "distribution": ref.distribution,
        "version": ref.version,
    }


def _stated(ref: PluginRef) -> tuple[dict[str, Any], Any]:
    """The facts and the API that a plugin's class states or inherits. A value that is no literal is None."""
    facts: dict[str, Any] = {}
    api: Any = None
    for cls in lineage(ref):
        for node in cls.body:
            if not isinstance(node, (ast.Assign, ast.AnnAssign)):
                continue
            names = [ast.unparse(one) for one in (node.targets if isinstance(node, ast.Assign) else [node.target])]
            if "api" in names and api is None:
                api = _literal(node.value)
            if "facts" in names and isinstance(node.value, ast.Dict):
                written = zip(node.value.keys, node.value.values, strict=True)
                facts = {str(_literal(key)): _literal(value) for key, value in written if key is not None} | facts
    return facts, api


def _literal(node: ast.expr | None) -> Any:
    """The JSON value of a literal; None for anything else."""
    try:
        value = ast.literal_eval(node) if node is not None else None
    except (TypeError, ValueError):
        return None
    return list(value) if isinstance(value, tuple) else value


def _checked(ref: PluginRef, problems: list[str]) -> dict[str, Any] | None:
    if ref.distribution == DISTRIBUTION:  # by its own tests
        return {"version": ref.version, "forge": own_version(), "api": list(API), "passed": True}
    file = shipped(ref)
    try:
        reported = read_report(file) if file else []
    except ConfigError as error:
        problems.append(str(error))
        return None
    return next((one["checked"] for one in reported if one["name"] == ref.name), None)


def shipped(ref: PluginRef) -> Path | None:
    """The report that a plugin's distribution ships, found without importing anything."""
    if is_file(ref.object):
        return None
    top = ref.module.partition(".")[0]
    home, module = folder(top), locate(top)
    file = home / REPORT if home else module.with_name(f"{top}.{REPORT}") if module else None
    return file if file and file.is_file() else None


def read_report(file: Path) -> list[dict[str, Any]]:
    """The entries of a report that `forge plugins check --report` wrote.

    Raises:
        ConfigError: if it is something else.
    """
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
        with_what = {key: read["checked_with"][key] for key in ("forge", "api", "python", "torch")}
        return [
            {
                **{key: one[key] for key in KEYS if key != "checked"},
                "checked": {"version": one["version"], **with_what, "passed": one["passed"] is True},
            }
            for one in read["plugins"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file}: expected a report of `forge plugins check --report`, which writes it again ({error!r})."
        ) from error
