"""Tokens that a run adds to its tokenizer (`tokenizer.add`): written before the run begins."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_train.base.errors import ConfigError
from forge_train_kit import model_files

from ..configuration.request import Request, UnknownPresetError, lay
from ..configuration.setup import resolve

if TYPE_CHECKING:
    from forge_train.contract.model import Model
    from forge_train.registry.setup import Setup
    from forge_train_kit.hf import HFModel
    from forge_train_kit.hf.folder import Folder

KEYS = ("add", "add_special")


def settings_of(request: Request) -> tuple[str, ...]:
    """The assignments of a request that add tokens."""
    try:
        values = lay(request).values
    except UnknownPresetError:  # `resolve` says what the name may mean
        return ()
    found = ((key, values.get(("tokenizer", key))) for key in KEYS)
    return tuple(
        f"tokenizer.{key}={one.value if one.read else json.dumps(one.value, ensure_ascii=False)}"
        for key, one in found
        if one is not None and one.value not in ([], "[]")
    )


@dataclass(frozen=True)
class Grown:
    """A folder in Hugging Face layout with tokens added to its tokenizer, and rows to its model."""

    folder: Folder
    """With the sizes of the larger model; its tensors are those that it has."""
    tokenizer: Path
    """A folder with the files of the tokenizer that has the tokens."""
    before: int
    """Token ids of the model without them."""
    note: str
    _scratch: tempfile.TemporaryDirectory[str] = field(repr=False)

    @classmethod
    def of(cls, folder: Folder, setup: Setup) -> Grown | None:
        """Return what a setup asks for; None if it adds no token.

        Raises:
            ConfigError: for a tokenizer that takes none, and for a token that it has.
        """
        from forge_train_kit.data.tokenizers.added import add_tokens
        from forge_train_kit.hf.grown import KEY, widened

        tokens, special = _asked(setup)
        if not (tokens or special):
            return None
        scratch = tempfile.TemporaryDirectory(prefix="forge-tokens-")
        place = Path(scratch.name) / model_files.FOLDER
        first = add_tokens(folder.path, place, tokens, special)
        wider = widened(folder, first + len(tokens) + len(special))
        before, after = folder.config[KEY], wider.config[KEY]
        names = ", ".join(f"{token!r} ({first + at})" for at, token in enumerate((*tokens, *special)))
        note = f"{names}: added. New rows start as the mean of the others: {before} token ids become {after}."
        if before == after:
            note = f"{names}: added. They take {len(tokens) + len(special)} of {before - first} rows without a token."
        return cls(wider, place, before, note, scratch)

    def layout(self, layout: HFModel, model: Model) -> HFModel:
        """The layout, as the larger model reads the folder's tensors."""
        from forge_train_kit.hf.grown import KEY, resized

        return resized(layout, model, self.before, self.folder.config[KEY])


def with_tokens(request: Request, run_dir: Path) -> Request:
    """A request whose tokenizer has the tokens that it adds, for a model that does not come from a folder.

    The tokenizer's files, with the tokens, are kept beside imported models.
    """
    if not settings_of(request):
        return request
    from forge_train_kit.data.tokenizers.added import add_tokens, check_added

    from .imported import FOLDER

    setup = resolve(request, training=False)
    place, (tokens, special) = model_files.option(setup.hooks), _asked(setup)
    path = Path(getattr(setup.config.sections[place[0]], place[1])) if place else Path()
    if place is None or not path.exists():
        return request
    try:
        check_added(path, (*tokens, *special))
        return request
    except ConfigError:
        content = {name: file.read_bytes() for name, file in sorted(model_files.files(path).items())}
    name = hashlib.blake2b(repr((content, tokens, special)).encode(), digest_size=4).hexdigest()
    target = run_dir / FOLDER / f"tokenizer-{name}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        add_tokens(path, target, tokens, special)
    return dataclasses.replace(request, set=(*request.set, f"{place[0]}.{place[1]}={target.absolute()}"))


def _asked(setup: Setup) -> tuple[tuple[str, ...], tuple[str, ...]]:
    name = setup.hooks.provider("tokenizer")
    section: Any = setup.hooks.plugins[name].config if name else None
    tokens, special = (tuple(getattr(section, key, ())) for key in KEYS)
    return tokens, special
