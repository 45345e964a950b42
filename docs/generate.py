"""Adds hooks and built-in plugins to the site's navigation, and plugins.json to its files. mkdocs runs it (`hooks:` in
mkdocs.yml)."""

from __future__ import annotations

import typing
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from forge_train.registry.declared import Specs
from forge_train.registry.discovery import DISTRIBUTION, discover
from forge_train_cli.directory import FILE as DIRECTORY


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the directory of plugins for programs."""
    files.append(File.generated(config, DIRECTORY.name, content=DIRECTORY.read_text(encoding="utf-8")))
    return files


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    for entry in typing.cast(list[dict[str, Any]], config.nav):
        if "Hooks" in entry:
            entry["Hooks"] += [{name: f"hooks/{name}.md"} for name in Specs([])]
        if "Plugins" in entry:
            names = [found.name for found in discover() if found.distribution == DISTRIBUTION]
            entry["Plugins"] += [{name: f"plugins/{name}.md"} for name in names]
    return config
