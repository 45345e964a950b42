"""The options of `image_tiles`. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from forge_train import Ge, Gt, Le, Problem, section


@section
class TileSection:
    """Tiles, encoder and connector."""

    size: Annotated[int, Gt(0)] = 224
    """Side of a tile in pixels."""
    tiles: Annotated[int, Gt(0)] = 4
    """Tiles of an image at most. The encoder computes so many for each image."""
    patch: Annotated[int, Gt(0)] = 16
    """Side of a patch in pixels."""
    max_pixels: Annotated[int, Gt(0), Le(89_478_485)] = 50_000_000
    """Images with more pixels are refused before they are decoded. Pillow itself stops at 89,478,485."""
    max_bytes: Annotated[int, Gt(0)] = 100_000_000
    """Files with more bytes are refused before they are read."""
    dim: Annotated[int, Gt(0)] = 192
    """Width of the encoder."""
    layers: Annotated[int, Gt(0)] = 6
    """Number of its first blocks."""
    global_layers: Annotated[int, Ge(0)] = 2
    """Number of the gated blocks after them."""
    heads: Annotated[int, Gt(0)] = 3
    """Heads of its attention, a divisor of dim."""
    hidden: Annotated[int, Ge(0)] = 0
    """Width of its feed-forward blocks; 0 means 4 · dim."""
    activation: Literal["gelu", "gelu_tanh", "quick_gelu", "relu"] = "gelu"
    """Activation of its feed-forward blocks. quick_gelu is x · sigmoid(1.702 x), as in CLIP."""
    outputs: tuple[int, ...] = ()
    """First blocks, counted from 0, whose outputs the connector reads beside that of the last global block."""
    norm_eps: Annotated[float, Gt(0)] = 1e-5
    """Added to the variance in the norms of its blocks."""
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Mean of red, green and blue, of 0 to 1, that is subtracted from pixels."""
    deviation: tuple[Annotated[float, Gt(0)], Annotated[float, Gt(0)], Annotated[float, Gt(0)]] = (0.5, 0.5, 0.5)
    """Standard deviation of red, green and blue that pixels are divided by."""
    std: Annotated[float, Gt(0)] = 0.02
    """Standard deviation of initial weights."""


def check(one: TileSection) -> Iterator[Problem]:
    """Rules between the options."""
    if one.size % one.patch:
        yield Problem("image_tiles.size", f"expected a multiple of patch = {one.patch}.")
    if one.dim % one.heads:
        yield Problem("image_tiles.heads", f"expected a divisor of dim = {one.dim}.")
    if beyond := [index for index in one.outputs if not 0 <= index < one.layers]:
        yield Problem("image_tiles.outputs", f"the blocks are 0 to {one.layers - 1}, found {beyond[0]}.")
