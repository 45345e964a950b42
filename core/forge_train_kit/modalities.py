"""Images, sounds, …: what a modality tells about its items, and how a fusion takes them into a model.

Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

__all__ = [
    "Encoder",
    "Fusion",
    "FusionSpec",
    "Grid",
    "Item",
    "ItemSource",
    "Modality",
    "encoders_of",
    "extras_of",
    "flops_of",
    "flops_of_encoders",
    "flops_of_items",
    "paces_of",
    "passes_of",
    "step_flops_of",
    "vectors_of",
]

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from .layers import Layer

Grid = tuple[int, int, int]
"""Patches of an item: along time, height and width. An image has one frame, a sound a height and a width of 1."""


@dataclass(frozen=True, slots=True)
class ItemSource:
    """The place of an encoded item: a file, or some bytes of it."""

    path: str
    """Absolute path of the file."""
    where: str
    """The record that names the item, for messages."""
    offset: int = 0
    size: int | None = None
    """Bytes from `offset` on; None for all of the file."""

    def __str__(self) -> str:
        return f"{self.where}: {self.path}"


@dataclass(frozen=True, slots=True)
class Item:
    """An item, decoded."""

    values: NDArray[Any]
    """`[patches, features]`, in the order that the encoder expects; of a dtype that it converts itself."""
    grid: Grid
    """Its product is the number of patches."""
    times: tuple[float, ...] = ()
    """Seconds from the item's beginning at which each of its frames was taken; empty for one without frames."""


class Modality(Protocol):
    """`modalities`: one kind of item, such as images. Every item of a kind takes part in a batch as patches.

    It may declare `spread(grid)`, numbers of an item's feature vectors along time, height and width, which come in
    reading order: models whose positions have three axes (M-RoPE) ask for it. None, or no such method, stands for
    vectors that count like tokens. With `pace(source)`, vectors are so many positions apart along time, rounded down,
    and not one (Qwen2.5-VL). And it may declare `smallest()`, the `Grid` of its smallest item, which stands in for one
    that can't be read where a run asks for that. With `texts(source)`, a text for each of as many equal groups
    of an item's frames, each group has its text before it, and counts as an item of its own; where a fusion gives an
    item one position, all texts stand before that, and the item stays one. With `written(source)`, a text with the
    placeholder once for each feature vector, that text stands in the place of an item's placeholder, unless a fusion
    gives an item one position.

    A model that is a class of another library takes items without a fusion: a modality for it declares
    `keywords(values, grids)`, arguments of the class by name, for `[patches, features]` and `[items, 3]` of all rows.

    With `encoded_by`, the name of another modality, the encoder of that one encodes its items too, `encoder` is not
    called, and both share all weights. `joined(owner)` is called first, with the other modality: it gives the modality
    to use, or raises a `ConfigError` where the two don't fit. The encoder is called for the items of each alone, and
    may tell them by the number of features.

    It is pickled where data is read by processes, so it holds options, not tensors. It may declare `example()`, an
    `Item` of zeros of the largest size that its options allow, or of a usual one: `forge plan` counts with it.
    """

    name: str
    """A Python identifier, such as `image`. Records hold items under its plural (`images`), and a batch holds extras
    that begin with it (`extras_of`)."""
    placeholder: str
    """The text that stands for an item in a record's text, such as `<image>`."""
    features: int
    """Numbers of a patch."""

    def public(self) -> Mapping[str, Any]:
        """The options that determine grids and positions, as JSON: prepared data is made again if they change."""
        ...

    def measure(self, source: ItemSource) -> Grid:
        """The grid of an item, from its header if that is enough.

        Raises:
            ConfigError: naming the file and the record.
        """
        ...

    def read(self, source: ItemSource) -> Item:
        """Decode an item. Data workers call it, in any order.

        Raises:
            ConfigError: naming the file and the record; the data plugin's `prefetch.on_error` decides what follows.
        """
        ...

    def positions(self, grid: Grid) -> int:
        """Number of feature vectors that the encoder gives for an item: the positions that a fusion with
        `gives = {"fusion": "features"}` gives it in the sequence."""
        ...

    def encoder(self, dim: int) -> Encoder:
        """Build the module that turns patches into features of a width; called on the meta device."""
        ...


class Encoder(Protocol):
    """Turns the patches of items into features: an encoder and its connector, an `nn.Module`.

    It may declare `units`, names of its modules to shard and recompute one by one, `flops(patches)`, operations of a
    forward pass over an item of so many patches (`flops_of`), and `step_flops(patches)`, those of a forward and a
    backward pass with what is frozen now (`step_flops_of`). If it gives other than one vector for each patch, it
    declares `vectors(grids)`, their numbers (`vectors_of`). Rows and items never see each other, nor the padding.
    """

    def __call__(self, values: Tensor, grids: Tensor) -> Tensor:
        """Encode the items of each row.

        Args:
            values: `[batch, patches, features]`, a row's items one after the other, then padding of zeros.
            grids: `[batch, items, 3]` int64, the `Grid` of each item; zeros where a row has fewer.

        Returns:
            `[batch, vectors, dim]`: each row's feature vectors in the order of its items, then anything.
        """
        ...


@dataclass(frozen=True, slots=True)
class FusionSpec:
    """Spec of a fusion, passed by a model to the plugin that builds it."""

    dim: int
    """Features of the hidden states."""
    layers: int
    """Number of the model's layers."""
    encoders: Mapping[str, Encoder]
    """Modality → its encoder, of width `dim`; the same one for modalities that share it (see `Encoders`)."""
    layer: Layer
    """Sizes of the model's first layer, for modules like those of layers."""
    std: float = 0.02
    """Standard deviation of initial weights."""
    blocks: Mapping[str, nn.Module] = field(default_factory=dict)
    """Layer number → the model's layer, on the meta device. A fusion may add weights to its modules, and change how
    they compute (`forge_train_kit.specialisation`)."""


class Fusion(Protocol):
    """`fusion`: joins the features of items with the hidden states, an `nn.Module` that the model keeps as `fusion`.

    Extras of a batch reach it as they are in `extras_of`. It may declare `tensor_plan()`, `units` and
    `flops_per_token(sequence)`, as a model does, and

    * `features(**extras)`, called once on each part that has some of `layers`, before the first of them: by name, what
      they are called with beside the extras;
    * `beside`, layer number → names of more of its modules, which a pipeline keeps with that layer;
    * `flops_of_items(**extras)`, what the items of a batch cost beyond its tokens (see the function of this name);
    * `new_cache()` and, for rows side by side, `new_slots(slots)`: what `features` gets as `cache`, with the number of
      tokens as `tokens`, while text is generated. The first tokens come with extras, later ones alone.
    """

    enter: nn.Module | None
    """`enter(hidden, **extras)` is called after the embedding, and gives hidden states of the same shape. Pipelines
    remove it from all parts but the first."""
    layers: nn.ModuleDict
    """Layer number → a module that is called as `(hidden, **extras)` before that layer, and gives the same shape. It
    stays beside its layer."""


def extras_of(name: str) -> tuple[str, str, str]:
    """The names of the extras by which a batch holds the items of a modality.

    Returns:
        Of the values `[batch, patches, features]`, the grids `[batch, items, 3]`, and the places
        `[batch, sequence]` int64: the feature vector of its row that stands at each position, and −1 at others. For a
        fusion with `gives = {"fusion": "token"}`, the item of its row whose placeholder stands there, counted from 0.
    """
    return f"{name}_values", f"{name}_grids", f"{name}_places"


def encoders_of(modalities: Mapping[str, Modality], dim: int) -> dict[str, Encoder]:
    """Modality → its encoder, of a width; modalities that share one have the same (`Modality.encoded_by`)."""
    owners = {name: getattr(one, "encoded_by", "") or name for name, one in modalities.items()}
    built = {name: modalities[name].encoder(dim) for name in dict.fromkeys(owners.values())}
    return {name: built[owner] for name, owner in owners.items()}


def paces_of(name: str) -> str:
    """The name of the extra that holds the `pace` of each item, `[batch, items]` fp32; left out where all are 1."""
    return f"{name}_paces"


def vectors_of(encoder: Encoder, grids: Tensor) -> Tensor:
    """The number of feature vectors of each item: what the encoder declares, or as many as patches.

    Args:
        encoder: of a modality.
        grids: `[batch, items, 3]`, zeros where there is no item.

    Returns:
        `[batch, items]` int64, 0 where there is no item; `Modality.positions` says the same of one grid.
    """
    declared = getattr(encoder, "vectors", None)
    counted: Tensor = grids.prod(-1) if declared is None else declared(grids)
    return counted


def flops_of(encoder: Encoder, grid: Grid) -> int:
    """Operations of a forward pass over an item: what the encoder declares, or one use of each of its weight matrices
    for each patch."""
    module: Any = encoder
    patches = grid[0] * grid[1] * grid[2]
    if hasattr(module, "flops"):
        return int(module.flops(patches))
    weights = sum(int(parameter.numel()) for parameter in module.parameters() if parameter.ndim > 1)
    return 2 * patches * weights


def step_flops_of(encoder: Encoder, grid: Grid) -> int:
    """Operations of a forward and a backward pass over an item: what the encoder declares, or those of three forward
    passes, and of one if all of it is frozen."""
    module: Any = encoder
    if hasattr(module, "step_flops"):
        return int(module.step_flops(grid[0] * grid[1] * grid[2]))
    return flops_of(encoder, grid) * passes_of(module)


def passes_of(module: nn.Module) -> int:
    """The number of forward passes that a step of a module costs: three, or one if it is frozen."""
    return 3 if any(one.requires_grad for one in module.parameters()) else 1


def flops_of_items(part: nn.Module, extras: Mapping[str, Tensor]) -> int:
    """Operations of a forward and a backward pass that the items of a batch cost on a part of a model, beyond its
    `flops_per_token`: what its fusion declares, or those of the encoders that it has under `encoders`.

    Args:
        part: composed.
        extras: of a batch with whole rows, on the CPU.
    """
    fusion: Any = getattr(part, "fusion", None)
    if fusion is None:
        return 0
    if declared := getattr(fusion, "flops_of_items", None):
        return int(declared(**extras))
    paths = ((path.split("."), module) for path, module in fusion.named_modules())
    holders = [module for names, module in paths if names[-1] == "encoders"]
    return flops_of_encoders((pair for one in holders for pair in getattr(one, "each", one.items)()), extras)


def flops_of_encoders(encoders: Iterable[tuple[str, Any]], extras: Mapping[str, Tensor]) -> int:
    """Operations of a forward and a backward pass of encoders, by modality, over the items of a batch."""
    found = 0
    for name, encoder in encoders:
        grids = extras.get(extras_of(name)[1])
        for time, height, width in [] if grids is None else grids.flatten(0, 1).tolist():
            found += step_flops_of(encoder, (time, height, width)) if time else 0
    return found
