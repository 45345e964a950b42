"""The description of a run in its folder: what is needed to repeat it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..base.files import write_json, write_whole
from ..config.validate import plain
from ..run.run import Run, writing

if TYPE_CHECKING:
    from ..config import Config
    from ..plugin.job import Hooks
    from ..registry.setup import Setup

log = logging.getLogger("forge_train")


def describe_run(run: Run, setup: Setup, step: int = 0, *, fresh: bool) -> None:
    """Describe the run in its folder; a fresh one takes the files that it keeps anew.

    Args:
        run: to describe.
        setup: of the run.
        step: where it goes on; metrics of later steps are dropped.
        fresh: whether it begins.

    Raises:
        ConfigError: if it can't be written.
    """
    config, hooks = setup.config, setup.hooks
    with writing(run.dir):
        (run.dir / "outcome.json").unlink(missing_ok=True)  # it has not ended yet
        for keeper in hooks.keepers.values():
            config = keeper.keep(config, hooks, run.dir, fresh=fresh)
        write_whole(run.dir / "config.toml", to_toml(config, hooks))
        write_json(run.dir / "plugins.json", plugin_list(hooks))
        write_json(run.dir / "environment.json", setup.environment())
    run.cut_metrics(step)


def plugin_list(hooks: Hooks) -> list[dict[str, str]]:
    """Return the content of plugins.json, sorted by name."""
    return [
        {
            "name": enabled.name,
            "distribution": enabled.ref.distribution,
            "version": enabled.ref.version,
            "object": enabled.ref.object,
            "hash": hooks.fingerprint(enabled.ref),
        }
        for enabled in hooks.enabled.values()
    ]


def to_toml(config: Config, hooks: Hooks) -> str:
    """Write the resolved configuration: `forge train` on it repeats the run. `run.name` is left out, and values that
    Forge filled in stand as they were written."""
    import tomlkit

    document = tomlkit.document()
    for key, value in hooks.selection(config, hooks).items():
        document[key] = _ordered(value) if isinstance(value, Mapping) else value
    for name, section in config.everything().items():
        values = {**plain(section), **config.as_written.get(name, {})}
        if name == "run":
            del values["name"]
        if values:
            document[name] = _ordered(values)
    return tomlkit.dumps(document)


def _ordered(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table without missing values, in which keys precede tables: TOML counts keys that follow a table as its own."""
    inner = {
        key: _ordered(value) if isinstance(value, Mapping) else [*map(_ordered, value)] if _are_tables(value) else value
        for key, value in table.items()
        if value is not None
    }
    return dict(sorted(inner.items(), key=lambda item: isinstance(item[1], dict) or _are_tables(item[1])))


def _are_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)
