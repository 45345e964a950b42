"""A causal language model of `transformers`, wrapped so that Forge's techniques can be applied to it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from forge_train import ConfigError, Init
from forge_train.compose.initialise import resetting
from forge_train_kit.model import Slots, TensorStyle, flops_per_token

from . import plan
from .attention import ClassSlots
from .items import Items
from .stages import Staging
from .weights import Drawn, Stored

HEAD = "head."
_ROPE = ("rope_parameters", "rope_scaling")
"""Attributes of a configuration that describe the rotary positions."""
_LONG = 1 << 20
"""A sequence long enough that the pieces of a tensor-parallel group's ranks are about equally long."""


def hf_name(name: str) -> str:
    """The name of a parameter or module in transformers."""
    return name.removeprefix(HEAD)


@dataclass(frozen=True)
class Facts:
    """Facts revealed by running the class on the meta device."""

    kernel: bool
    """True if the run's kernel computes attention."""
    isolates: bool
    """True if document ids reach attention in every unit."""
    attention_widths: Mapping[str, int]
    """Attention module → query heads × features."""
    staging: Staging | str
    """Cuts of the class for a pipeline, or the reason why it has none."""


class CausalLM(nn.Module):
    """The model without its head under its own name, such as `model` or `transformer`, and its head as `head`.

    Names are those of transformers, with `head.` in front of the head's. A pipeline removes modules: those of other
    parts are None, and their layers are deleted from the list.
    """

    def __init__(
        self,
        base: str,
        inner: Any,
        head: nn.Module,
        drawn: Drawn,
        facts: Facts,
        units: tuple[str, ...],
        piece: tuple[int, int],
    ) -> None:
        """
        Args:
            base: the name of the model without its head.
            inner: that model.
            head: of the class, or of a plugin.
            drawn: the first weights.
            facts: what a run of the class has shown.
            units: modules to shard, recompute and compile one by one.
            piece: this rank's index among those that tensor parallelism splits the model over, and their number.
        """
        super().__init__()
        self.base, self._units, self._facts, self._drawn, self._tensor_rank = base, units, facts, drawn, piece
        self.stored: Stored | None = None
        """Initial weights from files, if there are any."""
        self.items: Items | None = None
        """Images that the class is given, if it is."""
        self.config = inner.config
        self.add_module(base, inner)
        self.head: nn.Module | None = head
        table = inner.get_input_embeddings()
        self._table = next(f"{base}.{path}" for path, module in inner.named_modules() if module is table)
        known = inspect.signature(inspect.unwrap(type(inner).forward)).parameters
        self._takes = frozenset(known)
        longest = getattr(self.config, "max_position_embeddings", None)
        if isinstance(longest, int):
            self.max_sequence = longest

    def forward(
        self,
        x: Tensor,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: Any = None,
        **extras: Tensor,
    ) -> Tensor:
        """Hidden states `[batch, sequence, dim]` for token ids `[batch, sequence]`, or for the hidden states of the
        previous part; normed in the last part. `extras` are those of items."""
        together = isinstance(cache, ClassSlots)
        asked: dict[str, Any] = {"use_cache": cache is not None and not together}
        if document_ids is not None:
            if not self._facts.isolates:
                raise ConfigError(f"{no_documents(type(self._inner).__name__)}.")
            asked["document_ids"] = document_ids
        zero: Tensor | float = 0.0
        if self.items is not None:
            if self.items.along_axes:
                along = self.items.positions(self._inner, x, extras, document_ids, cache)
                position_ids = position_ids if along is None else along
            given, zero = self.items.given(self._inner, extras)
            asked |= given
        if position_ids is None and self._facts.kernel and cache is None:
            # Under sequence parallelism the class would count only the tokens of this rank's piece.
            position_ids = torch.arange(self._length(x), device=x.device)[None]
        if position_ids is not None and "position_ids" in self._takes:
            asked["position_ids"] = position_ids
        if cache is not None:
            asked["slots" if together else "past_key_values"] = cache
        if self.head is not None and self._first:
            hidden: Tensor = self._inner(input_ids=x, **asked)[0]
            return hidden if isinstance(zero, float) else hidden + zero.to(hidden.dtype)
        return self._piece(x, asked)

    def _piece(self, x: Tensor, asked: Mapping[str, Any]) -> Tensor:
        """The class's forward with the layers of this part."""
        staging, inner, out = self._staging, self._inner, list[Tensor]()
        layers = inner._modules[staging.layers]._modules
        kept = {int(at): layer for at, layer in layers.items()}
        with staging.standing_in(inner, kept, None if self._first else x, out):
            found: Tensor = inner(**{"input_ids" if self._first else "inputs_embeds": x}, **asked)[0]
        return found if self.head is not None else out[0]

    def _length(self, x: Tensor) -> int:
        """The length of whole sequences; between parts, hidden states may hold only pieces of them."""
        return int(x.shape[1]) * (1 if self._first else round(_LONG / self.hidden_shape(1, _LONG)[1]))

    @property
    def _first(self) -> bool:
        return self.embedding is not None

    @property
    def embedding(self) -> Any:
        """The input embedding; None if it is in another part."""
        return self._module(self._table)

    @property
    def _staging(self) -> Staging:
        if isinstance(self._facts.staging, str):
            raise TypeError(self._facts.staging)
        return self._facts.staging

    def _module(self, path: str) -> nn.Module | None:
        """A module; None if it is in another part."""
        found: nn.Module | None = self
        for name in path.split("."):
            found = None if found is None else found._modules.get(name)
        return found

    @property
    def _inner(self) -> Any:
        return self._modules[self.base]

    # -- what the model declares ------------------------------------------------------------------

    def initial(self, name: str) -> Init:
        """The value that the class would initialise it with, or the stored one."""
        source: Drawn | Stored = self.stored or self._drawn
        return Init("given", values=lambda seed: source.parameter(hf_name(name), seed))

    def reset_buffers(self) -> None:
        """Fill the tables that the constructor could not compute on the meta device.

        Modules that a transform added fill their own.
        """
        for path, module in self.named_modules():
            has_some = next(module.buffers(recurse=False), None) is not None
            if has_some and not resetting(self, path):
                for name, values in self._drawn.buffers(hf_name(path)).items():
                    getattr(module, name).copy_(values)
        self._drawn.drop()

    @property
    def units(self) -> tuple[str, ...]:
        """Modules to shard, recompute and compile one by one."""
        return tuple(unit for unit in self._units if self._module(unit) is not None)

    @property
    def stages(self) -> tuple[tuple[str, ...], ...]:
        """The stages that the class declares, as far as they are in this part.

        Raises:
            TypeError: explaining why the class can't be cut.
        """
        staging = self._staging
        entries = [tuple(f"{self.base}.{one}" for one in staging.before)]
        entries += [(f"{self.base}.{staging.layers}.{at}",) for at in range(len(staging.given))]
        entries.append((*(f"{self.base}.{one}" for one in staging.after), "head"))
        here = (tuple(name for name in entry if self._module(name) is not None) for entry in entries)
        return tuple(entry for entry in here if entry)

    @property
    def roles(self) -> dict[str, str]:
        """The input embedding and the head's parameters; a tied weight counts as the embedding."""
        table = getattr(self.embedding, "weight", None)
        found = {name: "embedding" for name, one in self.named_parameters() if one is table}
        head = self.head.named_parameters() if self.head is not None else ()
        return found | {f"{HEAD}{n}": "head" for n, one in head if one is not table}

    def hidden_shape(self, batch: int, sequence: int) -> tuple[int, ...]:
        """The shape of the head's input."""
        return batch, sequence, self.config.get_text_config().hidden_size

    def tensor_plan(self) -> dict[str, TensorStyle]:
        """The class's own plan, in Forge's styles.

        Raises:
            TypeError: naming what the class does not declare.
        """
        return plan.translated(self, self.base, self.units, kernel=self._facts.kernel, piece=self._tensor_rank)

    def flops_per_token(self, sequence: int) -> int:
        """Operations per token of a forward and a backward pass: each matrix counts once, of the experts only those
        that process the token, and causal attention counts if the run's kernel computes it."""
        table, text = getattr(self.embedding, "weight", None), self.config.get_text_config()
        tied = self.head is not None and any(one is table for one in self.head.parameters())
        chosen = getattr(text, "num_experts_per_tok", None)
        weights, encoders = 0.0, self.items.encoders if self.items is not None else ()
        for one in (one for name, one in self.named_parameters() if not name.startswith(encoders)):
            if one.ndim > 1 and (one is not table or tied):
                weights += one.numel() * (chosen / one.shape[0] if chosen and one.ndim == 3 else 1)
        here = (width for path, width in self._facts.attention_widths.items() if self._module(path) is not None)
        return flops_per_token(sequence, weights=int(weights), width=sum(here))

    def new_cache(self, batch: int, length: int) -> Any:
        """The library's cache.

        Raises:
            TypeError: if the class does not accept one.
        """
        if "past_key_values" not in self._takes:
            raise TypeError(f"{type(self._inner).__name__} does not accept past_key_values")
        return DynamicCache(config=self.config)

    def new_slots(self, slots: Slots) -> ClassSlots:
        """Caches for rows that are generated side by side; a forward with them is given positions.

        Raises:
            TypeError: if the class keeps more than keys and values, or its rows depend on each other's lengths.
        """
        config = self.config.get_text_config()
        others = {*(getattr(config, "layer_types", None) or ())} - {"full_attention", "sliding_attention"}
        by_length = re.search("dynamic|longrope", str([getattr(config, one, None) for one in _ROPE]))
        along_axes = self.items is not None and self.items.along_axes
        if not self._facts.isolates or "position_ids" not in self._takes or others or by_length or along_axes:
            raise TypeError(f"rows of {type(self._inner).__name__} can't continue side by side")
        if getattr(self._inner, "_is_stateful", False):
            raise TypeError(f"{type(self._inner).__name__} keeps states")
        return ClassSlots(slots)


def no_documents(name: str) -> str:
    """Why documents can't be kept apart, without the period."""
    return (
        f"hf: {name} computes attention itself, or mixes tokens in another way, so it can't keep the documents of a "
        "row apart"
    )
