"""State maps that a configuration or a command names."""

from __future__ import annotations

from pathlib import Path

from forge_train.base.errors import ConfigError, describe, nearest
from forge_train.base.names import import_module, is_file, split


def named(spec: str, key: str) -> object:
    """The object named by `folder/file.py:NAME` or `package.module:NAME`.

    Args:
        spec: its name.
        key: the option that names it, for errors.

    Raises:
        ConfigError: if it can't be imported or does not exist.
    """
    where, name = split(spec)
    if not name:
        raise ConfigError(f"{key}: {spec!r} names no object; write FILE.py:NAME or package.module:NAME.")
    if is_file(spec) and not Path(where).is_file():
        raise ConfigError(f"{key}: there is no file {where}.")
    try:
        module = import_module(spec)
    except (Exception, SystemExit) as error:  # a module may raise anything when it is imported
        raise ConfigError(f"{key}: {where} can't be imported: {describe(error)}.") from error
    if not hasattr(module, name):
        place = where if is_file(spec) else f"module {where!r}"
        raise ConfigError(f"{key}: {place} has no {name!r}.{nearest(name, vars(module))}")
    found: object = getattr(module, name)
    return found
