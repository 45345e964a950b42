"""The fusion of the `cross_attention` plugin."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from forge_train_kit.modalities import FusionSpec, flops_of_encoders
from forge_train_kit.model import Slots, TensorStyle, flops_per_token

from .items import Items
from .kept import Kept, KeptRows
from .layers import CrossLayer


class Between(nn.Module):
    """Layers that attend to items, between the model's own.

    Each part of a pipeline encodes the items again for the layers that it has, with encoders tied to the first:
    features differ in size from batch to batch, and would have to pass the parts between.

    Args:
        spec: of the model.
        at: layers before which one stands, in order.
        attend: items that a token attends to: all, last or run.
        gate: value at which gates start.
        parts: whether a pipeline will cut the model.
    """

    enter: nn.Module | None = None

    def __init__(self, spec: FusionSpec, at: Sequence[int], *, attend: str, gate: float, parts: bool) -> None:
        super().__init__()
        first, *others = at
        self._first = str(first)
        self.items: Items | None = Items(spec.encoders, attend)
        self.layers = nn.ModuleDict({str(index): CrossLayer(spec.layer, index, gate) for index in at})
        self.copies = nn.ModuleDict({str(index): _tied(self.items) for index in others} if parts else {})

    def features(self, *, cache: Kept | KeptRows | None = None, tokens: int = 0, **extras: Tensor) -> dict[str, Any]:
        """Arguments of `layers`: see `Items`."""
        reader = self.items if self.items is not None else next(iter(self.copies.values()))
        read: dict[str, Tensor] = reader(**extras)
        return read if cache is None else cache.next(read, tokens)

    def new_cache(self) -> Kept:
        """Room for keys and values of a text's items."""
        return Kept()

    def new_slots(self, slots: Slots) -> KeptRows:
        """The same for rows side by side.

        Raises:
            TypeError: if tokens may have to be forgotten.
        """
        return KeptRows(slots)

    @property
    def beside(self) -> Mapping[str, Sequence[str]]:
        """Layer → its encoders."""
        first = {self._first: ("items",)} if self.items is not None else {}
        return {**first, **{index: (f"copies.{index}",) for index in self.copies}}

    @property
    def units(self) -> tuple[str, ...]:
        """Its layers and the units of the encoders. Tied encoders have none: FSDP2 gathers shared weights once."""
        return (*(f"layers.{index}" for index in self.layers), *(() if self.copies else self._of_encoders()))

    def tensor_plan(self) -> dict[str, TensorStyle]:
        """Every rank encodes all items; its heads give part of the features' gradient."""
        plan: dict[str, TensorStyle] = {}
        for name in (*(["items"] if self.items is not None else []), *(f"copies.{index}" for index in self.copies)):
            plan |= {name: "sequence", f"{name}.encoders": "heads"}
        for index, layer in self.layers.items():
            assert isinstance(layer, CrossLayer)
            plan[f"layers.{index}"] = "sequence"
            plan |= {f"layers.{index}.{path}": style for path, style in layer.tensor_plan().items()}
        return plan

    def flops_per_token(self, sequence: int) -> int:
        """Operations per token of its layers."""
        return flops_per_token(sequence, weights=sum(layer.weights() for layer in self._own))

    def flops_of_items(self, **extras: Tensor) -> int:
        """Operations of the encoders, of keys and values, and of attention to them."""
        reader: Any = self.items if self.items is not None else next(iter(self.copies.values()), None)
        if reader is None:
            return 0
        vectors, pairs = reader.seen(**extras)
        each = sum(6 * layer.weights_of_items() * vectors + 12 * layer.attention.width * pairs for layer in self._own)
        return int(each) + (0 if self.items is None else flops_of_encoders(self.items.encoders.each(), extras))

    @property
    def _own(self) -> list[CrossLayer]:
        return [layer for layer in self.layers.values() if isinstance(layer, CrossLayer)]

    def _of_encoders(self) -> Iterator[str]:
        for name, encoder in self.items.encoders.items() if self.items is not None else ():
            yield from (f"items.encoders.{name}.{unit}" for unit in getattr(encoder, "units", ()))


def _tied(items: Items) -> Items:
    """The same once more, with the same parameters."""
    again = copy.deepcopy(items)
    for name, parameter in items.named_parameters(remove_duplicate=False):
        owner, _, attribute = name.rpartition(".")
        again.get_submodule(owner)._parameters[attribute] = parameter
    return again
