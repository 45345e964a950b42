"""Images and other items as arguments of a class of `transformers`."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forge_train import ConfigError
from forge_train.base.format import format_list
from forge_train_kit import hookspecs
from forge_train_kit.data.items.marks import token_of
from forge_train_kit.enabled_modalities import enabled_modalities
from forge_train_kit.modalities import extras_of
from forge_train_kit.specialisation import Specialisation

if TYPE_CHECKING:
    from forge_train import Job

_TOKEN = ("image_token_id", "image_token_index")
"""Keys of a configuration for the token at the positions of an image."""
_KINDS = "mm_token_type_ids"
_INDEXED = {_KINDS, "image_grid_thw"}
"""Arguments by which classes count positions along three axes."""


def _narrow(_: type, dtype: torch.dtype) -> dict[str, Any]:
    """A model of the library that says in which dtype it computes, rather than that of its weights in memory: classes
    cast pixels to it."""
    return {"dtype": property(lambda self: dtype)}


_NARROW = Specialisation(_narrow)


class Items:
    """Turns the extras of a batch into the arguments of a class.

    Args:
        modality: of the items.
        base: the name of the class without its head.
        inner: that class.
    """

    def __init__(self, modality: Any, base: str, inner: Any) -> None:
        self._modality = modality
        self._names = extras_of(modality.name)
        self._kinds = _KINDS in _arguments(inner.forward)
        self.along_axes = hasattr(inner, "get_rope_index")
        """True if the class counts positions along three axes, by its items."""
        decoder = inner.get_decoder()
        beside = [name for name, one in inner.named_children() if all(other is not decoder for other in one.modules())]
        self.encoders = tuple(f"{base}.{name}." for name in beside if decoder is not inner)
        """Beginnings of the names of parameters that tokens do not pass."""

    def given(self, inner: Any, extras: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor | float]:
        """The arguments, and a zero to add to the hidden states of a batch without items.

        The zero follows from the features of an example: so each rank runs the encoder, and gathers its weights.
        """
        values, grids, places = (extras.get(name) for name in self._names)
        if values is None or grids is None or places is None:
            return {}, 0.0
        counts = grids.prod(-1)
        real = torch.arange(values.shape[1], device=values.device) < counts.sum(-1, keepdim=True)
        if not real.any():
            return {}, self._zero(inner, values.device)
        found = self._modality.keywords(values[real], grids[counts > 0])
        return {**found, **({_KINDS: (places >= 0).int()} if self._kinds else {})}, 0.0

    def positions(
        self, inner: Any, x: Tensor, extras: Mapping[str, Tensor], document_ids: Tensor | None, cache: Any
    ) -> Tensor | None:
        """Positions `[3, batch, sequence]` as the class counts them, in each document from 0; None where they are those
        of text.

        A cache is told how many positions its items are ahead of their tokens.
        """
        ahead: Any = getattr(cache, "ahead", None)
        if ahead is not None:
            past = cache.get_seq_length()
            counted: Tensor = torch.arange(past, past + x.shape[1], device=x.device) + ahead
            return counted.expand(3, *x.shape)
        _, grids, places = (extras.get(name) for name in self._names)
        if grids is None or places is None or not bool((places >= 0).any()):
            return None
        found = torch.empty(3, *x.shape, dtype=torch.int64, device=x.device)
        for row in range(len(x)):
            sizes = [tuple(one) for one in grids[row].tolist() if one[0]]
            first = [0, *itertools.accumulate(self._modality.positions(one) for one in sizes)]
            for start, stop in _documents(None if document_ids is None else document_ids[row], x.shape[1]):
                here = places[row, start:stop]
                inside = set(here.tolist())
                mine = [at for at in range(len(sizes)) if first[at] in inside]
                found[:, row : row + 1, start:stop], _ = inner.get_rope_index(
                    x[row : row + 1, start:stop],
                    mm_token_type_ids=(here >= 0).int()[None],
                    image_grid_thw=grids[row][mine] if mine else None,
                )
        if cache is not None:
            cache.ahead = int(found.max()) + 1 - x.shape[1]
        return found

    def _zero(self, inner: Any, device: torch.device) -> Tensor:
        item = self._modality.example()
        values, grids = torch.from_numpy(item.values).to(device), torch.tensor([item.grid], device=device)
        found: Any = inner.get_image_features(**self._modality.keywords(values, grids))
        features = getattr(found, "pooler_output", found)
        parts = [features] if isinstance(features, Tensor) else [*features]
        return 0.0 * torch.stack([one.sum() for one in parts]).sum()


def items_of(model: Any, base: str, job: Job) -> Items | None:
    """The items that a class is given; None for text alone.

    Raises:
        ConfigError: naming what of them the class, or this layout, can't take.
    """
    name, inner = type(model).__name__, getattr(model, base)
    modalities = enabled_modalities(job)
    foreign = [one for one, modality in modalities.items() if not hasattr(modality, "keywords")]
    if foreign:
        raise ConfigError(
            f"hf: {name} is given token ids alone, and nothing would read {format_list(foreign)}; leave the "
            "plugin out, or take a model that `decoder` builds. A class that reads images needs hf_images instead."
        )
    if not modalities:
        return None
    if len(modalities) > 1:
        raise ConfigError(f"hf: {name} takes items of one modality, not of {format_list(modalities)}.")
    (modality,) = modalities.values()
    example: Any = modality
    item = example.example()
    asked = example.keywords(torch.from_numpy(item.values), torch.tensor([item.grid]))
    if missing := sorted(asked.keys() - _arguments(inner.forward)):
        raise ConfigError(f"hf: {name} of transformers takes no {format_list(missing)}, so it can't be given images.")
    if not hasattr(inner, "get_image_features"):
        raise ConfigError(
            f"hf: {name} of transformers has no get_image_features, which ranks without an image of their own call."
        )
    if hasattr(inner, "get_rope_index") and _INDEXED - _arguments(inner.get_rope_index):
        raise ConfigError(f"hf: {name} of transformers counts positions in a way that rows of documents can't follow.")
    layout = job.dist.layout
    shared = [axis.name for axis in layout.table.values() if axis.configured and not axis.splits_data]
    if split := [axis for axis in shared if layout.size(axis) > 1]:
        raise ConfigError(
            f"parallel.{split[0]}: {name} of transformers puts images among whole sequences, so with images its ranks "
            "can only work on different data (fsdp2, ddp, zero1); set it to 1."
        )
    _check_token(inner.config, modality.placeholder, job)
    if job.precision.param is not job.precision.master:
        for one in [one for one in inner.modules() if isinstance(one, PreTrainedModel)]:
            _NARROW(one, job.precision.param)
    return Items(modality, base, inner)


def _check_token(config: Any, placeholder: str, job: Job) -> None:
    """Raises ConfigError unless the class looks for the token that stands at the positions of images."""
    wanted = next((one for key in _TOKEN if (one := getattr(config, key, None)) is not None), None)
    found = token_of(hookspecs.tokenizer(job), placeholder)
    if wanted is None or wanted != found:
        raise ConfigError(
            f"hf: the class looks for the token {wanted} at the positions of an image ({_TOKEN[0]}), and the tokenizer "
            f"has {found} for {placeholder}; take both from one folder."
        )


def _arguments(function: Any) -> set[str]:
    return {*inspect.signature(inspect.unwrap(function)).parameters}


def _documents(ids: Tensor | None, length: int) -> Iterator[tuple[int, int]]:
    """The beginning and the end of each document of a row."""
    borders = [] if ids is None else (ids.diff().nonzero().flatten() + 1).tolist()
    return itertools.pairwise([0, *borders, length])
