"""Files that go with a model beside its weights: its tokenizer's, and what else Hugging Face layout has there.

A run and each of its checkpoints keep a copy of them, so that both can be moved, and an export gives them back.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from forge_train.base.errors import ConfigError
from forge_train.config import Config
from forge_train.config.schema import FilePath, mark
from forge_train.plugin.guards import Guarded
from forge_train.plugin.job import Hooks, Job
from forge_train.run.run import MODEL_FILES

from . import hookspecs
from .returns import results
from .tokenizer import Tokenizer

FOLDER = MODEL_FILES
"""Folder that holds them, beside `config.toml`."""
TOKENIZER, MODEL_CONFIG = "tokenizer.json", "config.json"
VOCABULARIES = (
    *(TOKENIZER, "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model", "spm.model"),
    *("vocab.json", "vocab.txt", "tiktoken.model", "qwen.tiktoken", "tekken.json", "tokenizer.model.v3"),
)
"""Files of which each makes a tokenizer, perhaps with others beside it."""
ITEMS = ("processor_config.json", "preprocessor_config.json")
"""Files that describe how images and other items are read; where both say something, the latter counts."""
OF_KIND = "_preprocessor_config.json"
"""End of the names of files that describe how items of one kind are read."""
NAMES = (
    *(*VOCABULARIES, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt"),
    *("chat_template.jinja", "chat_template.json", "generation_config.json", MODEL_CONFIG, *ITEMS),
)
TEMPLATES = "additional_chat_templates/*.jinja"


def vocabulary_of(found: Collection[str]) -> str:
    """The name of the file, among those of a folder, that makes its tokenizer; empty if none does."""
    return next((name for name in VOCABULARIES if name in found), "")


def option(hooks: Hooks) -> tuple[str, str] | None:
    """Section and key of the path of the run's tokenizer: the `FilePath` of the plugin that provides it."""
    name = hooks.provider("tokenizer")
    section = hooks.plugins[name].config if name else None
    if name is None or not dataclasses.is_dataclass(section):
        return None
    keys = (field.name for field in dataclasses.fields(section))
    return next(((name, key) for key in keys if mark(type(section), (key,), FilePath)), None)


def files(path: Path) -> dict[str, Path]:
    """Name → file of what belongs to a tokenizer.

    Args:
        path: a folder, or a `tokenizer.json`, which stands for its folder; a file of another name stands alone.
    """
    folder = path if path.is_dir() else path.parent
    if path.name != TOKENIZER and not path.is_dir():
        return {path.name: path} if path.is_file() else {}
    found = [*(folder / name for name in NAMES), *sorted(folder.glob(TEMPLATES)), *sorted(folder.glob(f"*{OF_KIND}"))]
    return {str(file.relative_to(folder)): file for file in found if file.is_file()}


def of(config: Config, hooks: Hooks, beside: Path) -> dict[str, Path]:
    """The files of the run with this configuration.

    Args:
        config: its configuration.
        hooks: its plugins.
        beside: the run's folder, or a checkpoint's, for a model that has such files and no tokenizer among them.
    """
    return files(path) if (path := _path(config, hooks)) else _without_tokenizer(beside)


def digest(job: Job) -> str | None:
    """Return the digest of the run's tokenizer, if there is one; what it gives for a short text is checked."""
    if not job.hooks.provider("tokenizer"):
        return None
    tokenizer = hookspecs.tokenizer(job)
    guard = Guarded(tokenizer, results(Tokenizer), job.hooks.whose("tokenizer"))
    guard.decode(guard.encode("a"))
    return tokenizer.digest


def folder_of(weights: str) -> Path:
    """The folder of the tokenizer's files in a checkpoint, or in a run's newest; it need not exist.

    Raises:
        ConfigError: there is no checkpoint.
    """
    from forge_train.checkpoint import checkpoint  # which imports torch

    return checkpoint.resolve(Path(weights)) / FOLDER


def expect_same_words(job: Job, weights: str, key: str) -> None:
    """Check that a checkpoint's model reads the same words from the same ids as this run's.

    Args:
        job: the run.
        weights: the checkpoint, or its run; nothing is checked where there is none, which loading it tells.
        key: the option that names it, for the message.

    Raises:
        ConfigError: it has another tokenizer; one that differs only in what begins or ends a text is the same.
    """
    from forge_train.checkpoint import checkpoint  # which imports torch

    try:
        path = folder_of(weights).parent
    except ConfigError:
        return
    saved, beside = checkpoint.read_state(path).get("tokenizer"), files(path / FOLDER)
    if (own := digest(job)) is None or saved == own or (saved is None and not vocabulary_of(beside)):  # an import
        return
    known = [_words(one) for one in (beside, of(job.config, job.hooks, job.run.dir))]
    if None in known or known[0] != known[1]:
        raise ConfigError(
            f"{key}: {path} was trained with another tokenizer: the ids of this run are other words to it. Choose a "
            "model of the same tokenizer.",
            key=key,
        )


def _words(found: Mapping[str, Path]) -> dict[str, int] | bytes | None:
    """Word → id, from a `tokenizer.json`; the content of another file that makes a tokenizer; None without one."""
    name = vocabulary_of(found)
    if name != TOKENIZER:
        return found[name].read_bytes() if name else None
    content = json.loads(found[name].read_text(encoding="utf-8"))
    words = content["model"].get("vocab", {})
    listed = words if isinstance(words, dict) else {word: number for number, (word, _) in enumerate(words)}
    return {**listed, **{one["content"]: one["id"] for one in content.get("added_tokens", ())}}


def keep(config: Config, hooks: Hooks, folder: Path, *, fresh: bool) -> Config:
    """Copy a run's files into its folder; gives its configuration, in which they are named relative to that folder.

    Args:
        config: the run's.
        hooks: its plugins.
        folder: the run's; its `config.toml` is to hold the configuration that is returned.
        fresh: whether to replace files that are there.
    """
    path, found = _path(config, hooks), {}
    if path is not None:
        found = files(path)
    elif config.train.init_from:
        found = _without_tokenizer(Path(config.train.init_from))
    target = folder / FOLDER
    if found and (fresh or not target.exists()) and not any(file.is_relative_to(target) for file in found.values()):
        copy(found, target)
    return relative(config, hooks, path) if path is not None and found else config


def relative(config: Config, hooks: Hooks, path: Path) -> Config:
    """The configuration as it stands beside a copy of the tokenizer's files."""
    place = option(hooks)
    if place is None:
        return config
    name, key = place
    value = FOLDER if path.is_dir() or path.name == TOKENIZER else f"{FOLDER}/{path.name}"
    section = dataclasses.replace(config.sections[name], **{key: value})
    return dataclasses.replace(config, sections={**config.sections, name: section})


def copy(found: Mapping[str, Path], target: Path) -> None:
    """Copy files into a folder, which is there whole or not at all."""
    part = target.with_name(f".{target.name}.partial")
    shutil.rmtree(part, ignore_errors=True)
    for name, file in found.items():
        (part / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, part / name)
    shutil.rmtree(target, ignore_errors=True)
    part.replace(target)


def _path(config: Config, hooks: Hooks) -> Path | None:
    """Return the path that the configuration names; None for a keyword such as `bytes`."""
    place = option(hooks)
    value = getattr(config.sections[place[0]], place[1]) if place else ""
    marked = mark(type(config.sections[place[0]]), (place[1],), FilePath) if place else None
    return Path(value) if marked and value and value not in marked.words else None


def _without_tokenizer(beside: Path) -> dict[str, Path]:
    """The files of a model that came without a tokenizer; one that is there was not asked for."""
    found = files(beside / FOLDER) or files(beside)  # the latter of a folder in Hugging Face layout
    return {} if vocabulary_of(found) else found
