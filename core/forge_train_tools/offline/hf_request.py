"""The configuration that the model and tokenizer of a folder in Hugging Face layout need."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_train.base.errors import ConfigError, nearest
from forge_train.plugin.job import Hooks
from forge_train.registry.discovery import discover
from forge_train.registry.setup import Setup
from forge_train_kit import kernels, model_files
from forge_train_kit.facts import ARCHITECTURES
from forge_train_kit.hf import HFModel
from forge_train_kit.hf.folder import CONFIG, Folder
from forge_train_kit.hf.start import described
from forge_train_kit.model_files import files, vocabulary_of

from ..configuration.request import Request
from ..configuration.setup import resolve

log = logging.getLogger("forge_train")

PRESET = "finetune"
"""The preset underneath the configuration of a model that came from a folder."""
ANY = "*"
"""Among the architectures of a plugin that can't list them."""


def starting_from(request: Request) -> Request:
    """A request with the model and tokenizer of the folder that it starts from; no tensor is read.

    Args:
        request: its `model_from` is in Hugging Face layout. If it has no configuration, it gets the one for
            fine-tuning.

    Raises:
        ConfigError: for a folder or an architecture that can't be imported.
    """
    source = Path(request.model_from)
    asked = dataclasses.replace(request, config=request.config or PRESET, model_from="")
    if not vocabulary_of(files(source)) and not any(one.startswith("tokenizer.") for one in asked.set):
        log.warning("%s has no tokenizer: text is read as bytes, which few models were trained on.", source)
    return with_folder(asked, source, source)


def with_folder(request: Request, source: Path, weights: Path) -> Request:
    """A request with the model and tokenizer of a folder in Hugging Face layout, that starts from these weights."""
    brought, _ = bring(Folder.open(source), request)
    train = {**brought.sections["train"], "init_from": str(weights.absolute())}
    return dataclasses.replace(brought, sections={**brought.sections, "train": train})


def bring(folder: Folder, request: Request, tokenizer: Path | None = None) -> tuple[Request, HFModel]:
    """A request with the sections for a folder's model and tokenizer, and how that model's tensors are named.

    Args:
        folder: of the model.
        request: to which the sections are added.
        tokenizer: the folder of its tokenizer, if that is another one.
    """
    file = folder.path / CONFIG
    folder.check_sizes()
    request = dataclasses.replace(request, sections_from=str(file))
    # without settings, because they may belong to plugins that only the folder's model needs
    bare = resolve(dataclasses.replace(request, set=(), environment=""), training=False)
    hooks, sequence = bare.hooks, bare.config.train.sequence
    layout = described(folder, hooks)
    if layout is None:
        raise ConfigError(f"{file}: {_unknown(folder.config, hooks)}")
    text = layout.config or folder.config
    longest = text.get("max_position_embeddings", text.get("n_positions"))
    train = {"sequence": min(sequence, longest) if isinstance(longest, int) else sequence}
    sections: dict[str, Mapping[str, Any]] = {**layout.sections, "train": train}
    tokenizer = tokenizer or folder.path
    if vocabulary_of(files(tokenizer)) and (place := model_files.option(hooks)):
        sections[place[0]] = {**sections.get(place[0], {}), place[1]: str(tokenizer.absolute())}
    more = tuple(name for name in layout.sections if name not in hooks.enabled)
    request = dataclasses.replace(request, sections=sections, brought=more)
    return dataclasses.replace(request, brought=(*more, *kernel_for(request))), layout


def kernel_for(request: Request) -> tuple[str, ...]:
    """A kernel that supports the model, if the default kernel does not and the user named no other."""
    setup = resolve(request, training=False)
    name = setup.hooks.provider("attention_kernel")
    asked = [one for _, one in kernels.needs_of(setup.hooks, setup.config)]
    if name is None or name not in setup.config.defaults.values() or setup.hooks.enabled[name].named:
        return ()
    able = kernels.able(asked)
    return () if name in able else tuple(able[:1])


def _unknown(config: Mapping[str, Any], hooks: Hooks) -> str:
    """The error for an architecture that no enabled plugin reads: the known ones, and which other plugins know it."""
    named = config.get("architectures") or [config.get("model_type")]
    asked = ", ".join(hooks.implementers("import_hf")) or "none"
    known = sorted({name for one in hooks.enabled.values() for name in ARCHITECTURES.of(one.cls)} - {ANY})
    installed = {one.name: ARCHITECTURES.read(one) for one in discover() if one.name not in hooks.enabled}
    others = [name for name, architectures in installed.items() if set(architectures) & set(named)]
    what = f"no enabled plugin knows the architecture {named!r}"
    if not config.get("architectures"):
        model_type = config.get("model_type")
        what = f"no enabled plugin reads it without architectures, which is missing (model_type is {model_type!r})"
    if others:
        return f"{what}; enable {' or '.join(others)} with --plugins."
    text = f"{what} (asked: {asked}). Known: {', '.join(known) or 'none'}."
    text += next((hint for name in named if (hint := nearest(str(name), known))), "")
    open_ended = [name for name, architectures in installed.items() if ANY in architectures]
    return f"{text} Plugin {' or '.join(open_ended)} may read it; enable it with --plugins." if open_ended else text


def data_key(setup: Setup) -> str:
    """The option for the data to train on."""
    return f"{setup.hooks.provider('build_data') or 'text'}.path"


def tokenizer_notes(folder: Folder, unfit: str) -> tuple[str, ...]:
    """Notes about a folder without a tokenizer, or with one that its model can't use for the reason `unfit`."""
    if not (name := model_files.vocabulary_of(model_files.files(folder.path))):
        text = f"{folder.path} has no tokenizer: the configuration reads bytes, which few models were trained on."
        return (f"{text} Name its tokenizer before training on text.",)
    if not unfit:
        return ()
    text = f"{folder.path / name} can't be used with this model ({unfit.rstrip('.')})"
    return (f"{text}; name another before training on text.",)
