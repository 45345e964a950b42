"""Imports a Hugging Face folder that a run starts from, once, and starts from its checkpoint."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from forge_train.base.errors import ConfigError
from forge_train.base.names import canonical
from forge_train.plugin.calls import implemented
from forge_train.registry.discovery import plugin_name
from forge_train.registry.setup import Setup
from forge_train.store.manifest import EDITABLE

from ..configuration.request import Request, lay
from ..configuration.setup import resolve
from ..sources import as_assignments
from .from_run import OF_MODEL, from_run
from .grown import settings_of
from .hf_request import PRESET, with_folder

FOLDER = "imported"
"""The folder of these checkpoints, next to the runs."""
SHAPING = {"head", "tail", "classes"}
"""Hooks whose plugins a user adds to a folder's model; their options may determine its weights."""


def imported(request: Request, run_dir: Path, told: Callable[[str], None]) -> Request:
    """A request with the model, weights and tokenizer of the folder's checkpoint, which is made first if it does not
    exist.

    If another process is importing the same folder, this one waits for it. Only plugins that make the model take part
    in it, so that a folder is imported once, whatever it is trained with. Changed files, other plugins of the model,
    or other tokens to add make another checkpoint.

    Args:
        request: its `model_from` is a folder in Hugging Face layout.
        run_dir: where runs are made.
        told: called with messages to show.

    Raises:
        ConfigError: for a mistake in the request, before anything is written; see `import_checkpoint`; or the
            checkpoint can't be written.
    """
    from .hf_import import import_checkpoint

    source = Path(request.model_from).resolve()
    stamps = [
        (file.name, stat.st_size, stat.st_mtime_ns)
        for file in sorted(source.iterdir())
        if file.is_file() and (stat := file.stat())
    ]
    asked = dataclasses.replace(request, config=request.config or PRESET, model_from="")
    bare = resolve(dataclasses.replace(asked, set=(), environment=""), training=False)
    makers, needed = _makers(bare)
    plugins = tuple(spec for spec in bare.config.plugins if plugin_name(spec) in needed)
    settings = (*settings_of(request), *_shaping(request, bare))
    made_of = repr((str(source), stamps, plugins, sorted(makers), settings))
    name = f"{source.name}-{hashlib.blake2b(made_of.encode(), digest_size=4).hexdigest()}"
    target = run_dir / FOLDER / name
    if not (target / EDITABLE).is_file():
        resolve(with_folder(asked, source, target), training=False)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = target.with_name(f".{name}.lock").open("a")
    except OSError as error:
        raise ConfigError(f"{target}: can't be written: {error.strerror or error}.") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (target / EDITABLE).is_file():
            without = tuple(_without(request, bare, needed))
            done = import_checkpoint(source, target, plugins=plugins, without=without, settings=settings)
            told(f"{source} is imported as {target}.")
            for note in done.notes:
                told(f"Note: {note}")
    return from_run(dataclasses.replace(request, model_from=str(target)))


def _makers(setup: Setup) -> tuple[set[str], set[str]]:
    """Return the plugins that make a model and its tokenizer, and these with the plugins that they can't do without."""
    enabled = setup.hooks.enabled
    makers = {
        name for name, one in enabled.items() if implemented(one.cls) & {*OF_MODEL, "import_hf", "import_hf_around"}
    }
    slots = {canonical(slot) for name in makers for slot in (*enabled[name].cls.requires, *enabled[name].cls.takes)}
    return makers, makers | {name for name, one in enabled.items() if slots & {name, *one.provides}}


def _shaping(request: Request, setup: Setup) -> Iterator[str]:
    """Yield the assignments for plugins that bring a part of the model."""
    tree = lay(request)
    for name, one in setup.hooks.enabled.items():
        if implemented(one.cls) & SHAPING:
            yield from as_assignments({".".join((name, *k)): v.value for k, v in tree.below((name,)).items()})


def _without(request: Request, setup: Setup, needed: set[str]) -> Iterator[str]:
    """Yield the plugins that the import leaves out too, but not the default of a slot that a plugin fills which takes
    no part in it."""
    slots: dict[str, set[str]] = {}
    for (_, *_, slot), name in ((key, one) for key, one in setup.config.base.items() if key[0] == "defaults"):
        slots.setdefault(canonical(name), set()).add(slot)
    for name in request.without:
        if all(setup.hooks.provider(slot) in (None, *needed) for slot in slots.get(canonical(name), ())):
            yield name
