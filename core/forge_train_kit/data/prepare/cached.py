"""Data that a run renders itself: prepared into a cache with its own tokenizer, when it starts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_train import ConfigError
from forge_train_kit import hookspecs, model_files

from ..chats import open_template, turn_end
from ..manifest import Prepared, open_prepared
from . import prepare, settled
from .progress import Told
from .tasks import Preparation

if TYPE_CHECKING:
    from forge_train import Job


def wanted_of(
    job: Job, paths: str | tuple[str, ...], cache: str, name: str, *, key: str = "", **more: Any
) -> Preparation:
    """A preparation in a plugin's cache, with the run's tokenizer.

    Args:
        job: of the run.
        paths: what to read.
        cache: the folder that was chosen; empty for the user's.
        name: of the plugin.
        key: the section or list item that has the paths; empty for the plugin's section.
        **more: of `Preparation`.

    Raises:
        ConfigError: the tokenizer is of a plugin that names no files; or the sources can't be found.
    """
    section, option = model_files.option(job.hooks) or ("", "")
    if not section:
        raise ConfigError(f"{name}: the run's tokenizer is of a plugin that names no files of it.")
    tokenizer = getattr(job.config.sections[section], option)
    sources = (paths,) if isinstance(paths, str) else paths
    return settled(Preparation(sources, Path(), tokenizer=tokenizer, section=key or name, **more), cache, name)


def stale(wanted: Preparation) -> str:
    """The sentence for a prepared folder whose tokens are not those of the run's tokenizer."""
    return (
        f"the tokens in {wanted.out} were made with another tokenizer than this run's, {wanted.tokenizer}; delete "
        "that folder to make them again, or choose another tokenizer plugin if that does not help."
    )


def obtained(wanted: Preparation, job: Job, name: str) -> Prepared:
    """The prepared folder, which is made if it is not there; another process that makes it is waited for.

    Raises:
        ConfigError: as of `prepare`; the chat template is not there, or can't end a turn; or the run's tokenizer is
            not the one of its files.
    """
    if wanted.chat:
        _check_template(wanted, job, name)
    key = f"{wanted.section or name}.path"
    replaced = wanted.items is not None and wanted.items.broken == "replace"
    prepare(wanted, Told(name, replaced=replaced), key=key, wait=True)
    prepared = open_prepared(wanted.out, key=key)
    if prepared.manifest.tokenizer["digest"] != hookspecs.tokenizer(job).digest:
        raise ConfigError(f"{name}: {stale(wanted)}")
    return prepared


def end_of_turns(wanted: Preparation, job: Job) -> int | None:
    """The token that ends a turn in the template of a preparation; None where it ends with plain text, or where a lone
    file of another name is the tokenizer."""
    path = Path(wanted.tokenizer)
    folder = path.parent if path.name == model_files.TOKENIZER else path
    if folder.is_file():
        return None
    template = open_template(wanted.template, folder if path.exists() else None, options=wanted.template_options)
    return turn_end(template, hookspecs.tokenizer(job))


def _check_template(wanted: Preparation, job: Job, name: str) -> None:
    """Refuse a template that is not there, or can't end a turn, before anything is read."""
    path = Path(wanted.tokenizer)
    folder = path.parent if path.name == model_files.TOKENIZER else path
    if path.is_file() and folder == path:
        return  # a file of another name becomes a folder first
    opened = partial(open_template, wanted.template, folder if path.exists() else None)
    try:
        opened()
    except ConfigError as error:
        other = "" if path.exists() else _way_to_a_model(job, name)
        raise ConfigError(f"{name}.template: {error}{other}") from error
    try:
        template = opened(options=wanted.template_options)
    except ConfigError as error:
        raise ConfigError(f"{name}.template_options: {error}") from error
    try:
        turn_end(template, hookspecs.tokenizer(job))
    except ConfigError as error:
        raise ConfigError(f"{name}.template: {error}") from error


def _way_to_a_model(job: Job, name: str) -> str:
    """Suggest how a run gets a model with its tokenizer."""
    if start := job.config.train.init_from:
        return f" `forge train --from {start} …` takes the tokenizer of that model too; train.init_from does not."
    return f" To fine-tune a model, name its folder: forge train FOLDER -p {name} …"
