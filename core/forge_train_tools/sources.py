"""Requests from what a user names: a configuration, a run to resume, a Hugging Face folder."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_train.base.errors import ConfigError

if TYPE_CHECKING:
    from .configuration.request import Request

PRESET, RUN_DIR = "quickstart", "runs"
LONGEST = 3600.0
"""Seconds that the other processes wait for the first one to fetch a checkpoint."""


def as_assignments(values: Mapping[str, Any]) -> Iterator[str]:
    """Python values as `--set` takes them: `key=value`.

    Args:
        values: dotted key → value, or section → its keys and values.

    Raises:
        ConfigError: for a value that a configuration can't have.
    """
    for key, value in values.items():
        if isinstance(value, Mapping) and "." not in key:
            yield from as_assignments({f"{key}.{name}": inner for name, inner in value.items()})
            continue
        text = str(value) if isinstance(value, (str, Path)) else _toml(key, value)
        if text != text.strip(" "):
            raise ConfigError(f"set: {key}: a text can't begin or end with a space here; write it in a TOML file.")
        yield f"{key}={text}"


def _toml(key: str, value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (str, Path)):
        return json.dumps(str(value), ensure_ascii=False)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_toml(key, one) for one in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_toml(key, str(name))} = {_toml(key, one)}' for name, one in value.items())}}}"
    what = "leave the key out to keep its default" if value is None else "expected a number, text, list or table"
    raise ConfigError(f"set: {key}: {value!r} is not a value of a configuration; {what}.")


def with_configuration(request: Request, resume: str) -> Request:
    """If none is named: the configuration in the run or checkpoint to resume, or else the preset."""
    if request.config or request.model_from:
        return request
    path = Path(resume)
    if _is_trained(path):
        return dataclasses.replace(request, config=str(path / "config.toml"), foreign=resume)
    return dataclasses.replace(request, config=PRESET)


def hugging_face(request: Request, run_dir: Path, say: Callable[[str], None]) -> Request:
    """The request to run. If its configuration is a folder in Hugging Face layout, it is first imported as a
    checkpoint; if it starts from such a folder, or from a run, that one's model is added to it."""
    from .packing.archive import is_pack

    if request.config and is_pack(Path(request.config)):
        raise ConfigError(f"{request.config} is a pack of a run, which only `forge train` takes as a configuration.")
    if request.model_from:
        return _with_model(request, run_dir, say)
    path = Path(request.config)
    from forge_train_kit.foreign import advice

    if not (path.is_dir() or (path.is_file() and advice(path))):
        from .offline.grown import with_tokens

        return with_tokens(request, run_dir)
    from forge_train_kit.hf.folder import Folder, is_hugging_face

    from .configuration.presets import presets
    from .offline.imported import imported

    if not is_hugging_face(path):
        if request.config and request.config not in presets() and not (path / "config.toml").is_file():
            Folder.open(path)  # says what the path is instead
        return request
    return imported(dataclasses.replace(request, config="", model_from=request.config), run_dir, say)


def _with_model(request: Request, run_dir: Path, say: Callable[[str], None]) -> Request:
    """The request with the model that it starts from: that of a run, or of a folder, which is imported if the run adds
    tokens to it, or keeps a part of the weights and reads the others again."""
    from .configuration.setup import resolve
    from .offline.from_run import from_run
    from .offline.grown import settings_of
    from .offline.hf_request import starting_from
    from .offline.imported import imported

    if _is_trained(Path(request.model_from)):
        return from_run(request)
    if settings_of(request):
        return imported(request, run_dir, say)
    started = starting_from(request)
    only = resolve(started, training=False).config.checkpoint.only
    return imported(request, run_dir, say) if only else started


def fetch(resume: str, folder: Path) -> str:
    """The run or checkpoint to resume. If it is an address, the first process fetches it and the others wait."""
    from forge_train.base.files import plain
    from forge_train_kit.stores.addresses import address_of

    if not (address := address_of(resume)):
        return plain(resume)
    from forge_train_kit.stores.fetching import fetched, target_of

    from .launching.world import here

    if here().rank == 0:
        return fetched(address, folder)
    target = target_of(address, folder)
    deadline = time.monotonic() + LONGEST
    while not _is_trained(target):
        if time.monotonic() > deadline:
            raise ConfigError(f"{target}: the first process has not fetched it from {resume} in {LONGEST:g} s.")
        time.sleep(0.5)
    return str(target)


def continuing(request: Request, folder: str, model: str | Path) -> Request:
    """The request, with the plugin that continues the adapter in a folder of PEFT; warns if it was trained on another.

    Args:
        request: to which it is added.
        folder: of the adapter.
        model: what the request names as its model.

    Raises:
        ConfigError: for what is no such folder, and for a kind of adapter that no plugin continues.
    """
    from forge_train.registry.discovery import discover
    from forge_train_kit.facts import ADAPTERS

    from .offline.adapter_base import warn_of_another_base

    file = Path(folder) / "adapter_config.json"
    try:
        kind = json.loads(file.read_text(encoding="utf-8")).get("peft_type")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(
            f"--adapter {folder}: expected a folder of PEFT with an {file.name}.{_hint(folder)}"
        ) from error
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"--adapter {folder}: {file.name} can't be read: {error}.") from error
    plugin = next((one.name for one in discover() if kind in ADAPTERS.read(one)), None)
    if plugin is None:
        raise ConfigError(f"--adapter {folder}: no installed plugin continues an adapter of the kind {kind!r}.")
    warn_of_another_base(folder, Path(model))
    values = {f"{plugin}.adapter": Path(folder).absolute()}
    return dataclasses.replace(request, plugins=(*request.plugins, plugin), set=(*as_assignments(values), *request.set))


def _hint(folder: str) -> str:
    """Say how the adapter of a run or a checkpoint is written; empty for another folder."""
    if not _is_trained(Path(folder)):
        return ""
    return f" Write the one of a run: forge checkpoint export {folder} NEW --adapter"


def _is_trained(path: Path) -> bool:
    """Return True for a run or a checkpoint."""
    from forge_train.run.run import is_checkpoint, is_run

    return is_run(path) or is_checkpoint(path)
