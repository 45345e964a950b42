"""Models in Hugging Face layout whose vocabulary grows where they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from forge_train.base.errors import ConfigError
from forge_train.contract.model import Model

from ..state_map import Chain, Resize
from .folder import CONFIG, Folder
from .model import HFModel

KEY = "vocab_size"


def widened(folder: Folder, vocabulary: int) -> Folder:
    """A folder as if its model had at least so many token ids; its tensors are those that it has.

    Raises:
        ConfigError: for a `config.json` without `vocab_size`.
    """
    rows = folder.config.get(KEY)
    if not isinstance(rows, int):
        raise ConfigError(f"tokenizer.add: {folder.path / CONFIG} has no {KEY} that could grow.")
    return replace(folder, config={**folder.config, KEY: max(rows, vocabulary)})


def resized(layout: HFModel, model: Model, before: int, after: int) -> HFModel:
    """A layout whose files have fewer rows for the vocabulary than the model: new rows begin as the mean of the others.

    Args:
        layout: of the model.
        model: as it is composed, with `after` token ids.
        before: token ids of the files.
        after: token ids of the model.
    """
    if before == after:
        return layout
    owners = {name.rpartition(".")[0] for name, role in model.roles.items() if role in ("embedding", "head")}
    shapes: Mapping[str, tuple[int, ...]] = {name: tuple(one.shape) for name, one in model.state_dict().items()}
    names = tuple(name for name, shape in shapes.items() if name.rpartition(".")[0] in owners and shape[0] == after)
    grow = Resize(names, before, after, "mean")
    return replace(
        layout,
        map=Chain((layout.map, grow)),
        others=tuple(Chain((one, grow)) for one in layout.others),
    )
