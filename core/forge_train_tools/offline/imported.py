"""Imports a Hugging Face folder given as a configuration, once, and uses its checkpoint's configuration."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
from collections.abc import Callable
from pathlib import Path

from forge_train.base.errors import ConfigError
from forge_train.registry.discovery import discover, plugin_name
from forge_train.store.manifest import EDITABLE
from forge_train_kit.facts import TUNES

from ..configuration.request import Request, lay

FOLDER = "imported"
"""The folder of these checkpoints, next to the runs."""


def imported(request: Request, run_dir: Path, told: Callable[[str], None], tokens: tuple[str, ...] = ()) -> Request:
    """The request with the configuration of the folder's checkpoint, which is made first if it does not exist.

    If another process is importing the same folder, this one waits for it. Changed files or other plugins make another
    checkpoint; those that tune a trained model (`hf.tunes`) take no part in it.

    Args:
        request: its `config` is a folder in Hugging Face layout.
        run_dir: where runs are made.
        told: called with messages to show.
        tokens: assignments that add tokens, beside those of the request.

    Raises:
        ConfigError: see `import_checkpoint`; or the checkpoint can't be written.
    """
    from .grown import settings_of
    from .hf_import import import_checkpoint

    source = Path(request.config).resolve()
    stamps = [
        (file.name, stat.st_size, stat.st_mtime_ns)
        for file in sorted(source.iterdir())
        if file.is_file() and (stat := file.stat())
    ]
    tuning = {one.name for one in discover() if TUNES.read(one)}
    plugins = tuple(one for one in request.plugins if plugin_name(one) not in tuning)
    tokens = (*tokens, *settings_of(dataclasses.replace(request, config="")))
    made_of = repr((str(source), stamps, sorted(plugins), sorted(request.without), *tokens))
    name = f"{source.name}-{hashlib.blake2b(made_of.encode(), digest_size=4).hexdigest()}"
    target = run_dir / FOLDER / name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = target.with_name(f".{name}.lock").open("a")
    except OSError as error:
        raise ConfigError(f"{target}: can't be written: {error.strerror or error}.") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (target / EDITABLE).is_file():
            done = import_checkpoint(source, target, plugins=plugins, without=request.without, settings=tokens)
            told(f"{source} is imported as {target}.")
            for note in done.notes:
                told(f"Note: {note}")
    asked = lay(dataclasses.replace(request, config="")).values
    more = ("train.steps=0",) if ("train", "epochs") in asked else ()  # the imported file has the preset's
    return dataclasses.replace(request, config=str(target / EDITABLE), set=(*more, *request.set))
