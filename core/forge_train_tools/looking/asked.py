"""A request to `forge debug look`: a text, and heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from forge_train.base.errors import ConfigError
from forge_train_kit.activations import layers_of
from forge_train_kit.activations.heads import kernel_of
from forge_train_kit.tokenizer import Tokenizer

from ..inference.asked import Inference
from ..offline.opening import Source, Wanted, find
from .watch import why_without

USUAL_LAYERS, USUAL_HEADS = 3, 2
"""Layers, and heads of each, whose attention is shown without `--heads`."""


@dataclass(frozen=True, kw_only=True)
class Looking:
    """A request to look into a model.

    Args:
        path: a run, a checkpoint or a Hugging Face folder.
        text: to read.
        items: files by modality, at the text's placeholders, or before it.
        heads: `L.H` each, the number of a layer and of a head of it, or `L.*`; empty for a few.
        plugins: to enable too; so is `set`, values to override.
    """

    path: Path
    text: str
    items: Mapping[str, Sequence[str]] = field(default_factory=dict)
    heads: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    set: tuple[str, ...] = ()

    def source(self, world: int) -> Source:
        """The weights, and the configuration for a number of processes."""
        if world == 1:
            return find(self.path, wanted=Wanted(self.plugins, self.set, data=False))
        same = Inference(path=self.path, data=(), out=Path(), batch=1, plugins=self.plugins, set=self.set)
        return same.source(world)


def encoded(text: str, tokenizer: Tokenizer) -> list[int]:
    """A text as tokens, with the beginning of a document.

    Raises:
        ConfigError: if it has no token.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"--text: is not UTF-8 at character {error.start}; give it as UTF-8.") from error
    own = tokenizer.encode(text)
    if not own:
        raise ConfigError("--text: has no token; give a text to read.")
    begin = list(tokenizer.begin)
    return own if begin and own[: len(begin)] == begin else [*begin, *own]


def chosen(part: nn.Module, asked: Sequence[str]) -> dict[str, list[int]]:
    """Layer → the heads to show.

    Raises:
        ConfigError: for a head that the model does not have, or a layer without attention weights.
    """
    layers = layers_of(part)
    if not layers:
        raise ConfigError(f"{type(part).__name__} declares no layers (units), so there is nothing to look at.")
    counts = {name: head_count(part, name) for name in layers}
    if not asked:
        able = [name for name in layers if counts[name]]
        spread = (
            sorted({at * (len(able) - 1) // max(USUAL_LAYERS - 1, 1) for at in range(USUAL_LAYERS)}) if able else []
        )
        return {able[at]: list(range(min(USUAL_HEADS, counts[able[at]]))) for at in spread}
    found: dict[str, list[int]] = {}
    for one in asked:
        layer, _, head = one.partition(".")
        if not layer.isdigit() or not (head.isdigit() or head == "*"):
            raise ConfigError(f"--heads: expected L.H, the numbers of a layer and of a head of it, found {one!r}.")
        if int(layer) >= len(layers):
            raise ConfigError(f"--heads: {one}: the model's layers are 0 to {len(layers) - 1}.")
        name = layers[int(layer)]
        if not counts[name]:
            raise ConfigError(f"--heads: {one}: {why_without(part.get_submodule(name))}.")
        if head != "*" and int(head) >= counts[name]:
            raise ConfigError(f"--heads: {one}: the heads of layer {layer} are 0 to {counts[name] - 1}.")
        some = found.setdefault(name, [])
        some += [number for number in (range(counts[name]) if head == "*" else [int(head)]) if number not in some]
    return found


def head_count(part: nn.Module, name: str) -> int:
    """Query heads of a layer's attention; 0 without."""
    module = kernel_of(part.get_submodule(name))
    return int(getattr(module, "heads", 0)) if module is not None else 0
