"""The options that the plugins of `vision` share. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from forge_train import FilePath, Ge, Gt, Le, Problem, Volatile, section

from .vision_folder import check_borrowed


@section
class VisionSection:
    """The size of images, their encoder and its connector."""

    size: Annotated[int, Gt(0)] = 224
    """Side of an image in pixels."""
    patch: Annotated[int, Gt(0)] = 16
    """Side of a patch in pixels."""
    merge: Annotated[int, Gt(0)] = 2
    """Side of the square of patches that becomes one position of the sequence."""
    fit: Literal["square", "crop", "keep"] = "square"
    """Resize each image to size × size pixels (square); resize it so that its shorter side has size pixels, and cut
    the middle out (crop); or keep its aspect, with sides that are multiples of patch · merge, and make it smaller
    only if it has more than size² pixels (keep)."""
    least_pixels: Annotated[int, Ge(0)] = 0
    """Fewest pixels of an image with fit = keep; smaller ones are made larger."""
    most_pixels: Annotated[int, Ge(0)] = 0
    """Most pixels of an image with fit = keep; 0 means size²."""
    placeholder: str = ""
    """Text that stands for an item in records and prompts; empty means <image>, and <video> for clips."""
    max_pixels: Annotated[int, Gt(0), Le(89_478_485)] = 50_000_000
    """Images with more pixels are refused before they are decoded. Pillow itself stops at 89,478,485."""
    max_bytes: Annotated[int, Gt(0)] = 100_000_000
    """Files with more bytes are refused before they are read."""
    model: Annotated[str, FilePath()] = ""
    """Folder of a vision transformer of `transformers`, such as CLIP's, SigLIP's or DINOv2's, which encodes images with
    the class and the weights that it holds. Size, patch, dim, heads, mean and deviation
    then follow from its files."""
    dim: Annotated[int, Gt(0)] = 192
    """Width of the encoder."""
    layers: Annotated[int, Gt(0)] = 6
    """Number of its blocks."""
    heads: Annotated[int, Gt(0)] = 3
    """Heads of its attention and of the connector's, a divisor of dim."""
    hidden: Annotated[int, Ge(0)] = 0
    """Width of its feed-forward blocks; 0 means 4 · dim."""
    activation: Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "silu"] = "gelu_tanh"
    """Activation of its feed-forward blocks. quick_gelu is x · sigmoid(1.702 x), as in CLIP."""
    gated: bool = False
    """Feed-forward blocks multiply the activation of one projection by another (SwiGLU with silu, as in Qwen2.5-VL)."""
    norm: Literal["layer", "rms"] = "layer"
    """LayerNorm or RMSNorm in its blocks, and after the last one."""
    norm_place: Literal["before", "after"] = "before"
    """Norms of a block are of what attention and feed-forward read, or of what they give (EVA-CLIP-E in CogVLM)."""
    norm_eps: Annotated[float, Gt(0)] = 1e-6
    """Added to the variance (or the mean square) in its norms."""
    window: Annotated[int, Ge(0)] = 0
    """Side of the squares of patches in which attention stays (Qwen2.5-VL, arXiv:2502.13923, §2.1.1), from the upper
    left corner on; 0 means the whole frame."""
    full_layers: tuple[Annotated[int, Ge(0)], ...] = ()
    """Blocks, counted from 0, in which attention covers the frame despite `window`."""
    bias: bool = True
    """Biases in its blocks."""
    patch_bias: bool = True
    """A bias in the projection of patches."""
    patch_frames: Annotated[int, Gt(0)] = 1
    """Frames that the projection of a patch takes; an image stands for each of them (Qwen2-VL: 2)."""
    class_token: bool = False
    """A learned vector before the patches, which attention sees and the connector does not (CLIP)."""
    first_norm: bool = False
    """A norm before the first block (CLIP)."""
    final_norm: bool = True
    """A norm after the last block."""
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Mean of red, green and blue, of 0 to 1, that is subtracted from pixels."""
    deviation: tuple[Annotated[float, Gt(0)], Annotated[float, Gt(0)], Annotated[float, Gt(0)]] = (0.5, 0.5, 0.5)
    """Standard deviation of red, green and blue that pixels are divided by."""
    positions: Literal["learned", "sines", "sines_1d", "rotary"] = "learned"
    """Add a learned vector of each place in the grid, interpolated for images of another shape; sines of row and
    column; sines of the number in reading order; or rotate queries and keys by row and column (Qwen2-VL)."""
    connector: Literal["linear", "mlp", "gated", "pooling", "resampler"] = "mlp"
    """Project the features of merged patches to the model's width (linear), twice with GELU in between (mlp), before
    LayerNorm, GELU and SwiGLU (gated, as in CogVLM), after their mean has attended to them (pooling), or after learned
    queries have attended to the whole image, which then takes as many positions as there are queries (resampler)."""
    connector_hidden: Annotated[int, Ge(0)] = 0
    """Width between the two projections of the connector mlp, and of the SwiGLU of gated; 0 means the model's."""
    queries: Annotated[int, Ge(0)] = 0
    """Learned queries of the resampler."""
    std: Annotated[float, Gt(0)] = 0.02
    """Standard deviation of initial weights."""
    once: bool = False
    """Run the encoder without its connector once for each content, as long as it is frozen, and keep what it gives on
    disk."""
    cache: Annotated[str, Volatile()] = ""
    """Folder of what `once` keeps; empty means forge-train/encoded in $XDG_CACHE_HOME or ~/.cache."""
    cache_bytes: Annotated[int, Gt(0), Volatile()] = 10_000_000_000
    """Bytes that the folder may take. Beyond, what other weights gave is removed first, and then nothing more is
    kept."""


ENCODER = (
    *(
        "model",
        "patch",
        "merge",
        "dim",
        "layers",
        "heads",
        "hidden",
        "activation",
        "gated",
        "norm",
        "norm_eps",
        "norm_place",
    ),
    *("window", "full_layers", "bias", "patch_bias", "patch_frames", "class_token", "first_norm", "final_norm"),
    *("mean", "deviation", "positions", "connector", "connector_hidden", "queries", "std", "once", "cache"),
    "cache_bytes",
)
"""Options of the encoder and its connector; the others are of what is read."""


def check_shared(one: VisionSection, name: str, owner: str) -> Iterator[Problem]:
    """Rules for a plugin whose items the encoder of another one encodes."""
    for option in ENCODER:
        if getattr(one, option) != getattr(VisionSection, option):
            yield Problem(
                f"{name}.{option}", f"has no effect, since the encoder is that of {owner}; set {owner}.{option}."
            )
    yield from _check_pixels(one, name)


def check(one: VisionSection, name: str) -> Iterator[Problem]:
    """Rules between the options of a plugin's section."""
    if one.size % (one.patch * one.merge):
        yield Problem(f"{name}.size", f"expected a multiple of patch · merge = {one.patch * one.merge}.")
    if one.model:
        yield from check_borrowed(one, name)
    if one.dim % one.heads:
        yield Problem(f"{name}.heads", f"expected a divisor of dim = {one.dim}.")
    if one.class_token and (one.fit == "keep" or one.positions != "learned"):
        yield Problem(f"{name}.class_token", 'needs fit = "square" and positions = "learned".')
    if one.dim % (unit := {"sines": 4, "sines_1d": 2, "rotary": 4 * one.heads}.get(one.positions, 1)):
        yield Problem(f"{name}.dim", f'expected a multiple of {unit} for positions = "{one.positions}".')
    if (one.connector == "resampler") != (one.queries > 0):
        yield Problem(f"{name}.queries", 'is for connector = "resampler", which needs at least one.')
    if one.connector == "resampler" and one.merge > 1:
        yield Problem(f"{name}.merge", "a resampler takes patches one by one; set it to 1.")
    if one.window and (one.class_token or not any(i not in one.full_layers for i in range(one.layers))):
        yield Problem(f"{name}.window", "has no effect where all blocks are in full_layers, and excludes class_token.")
    if one.window % one.merge:
        yield Problem(f"{name}.window", f"expected a multiple of merge = {one.merge}.")
    if one.full_layers and (not one.window or max(one.full_layers) >= one.layers):
        yield Problem(f"{name}.full_layers", f"expected blocks from 0 to {one.layers - 1}, and a window.")
    if one.connector_hidden and one.connector not in ("mlp", "gated"):
        yield Problem(f"{name}.connector_hidden", 'is for connector = "mlp" or "gated".')
    yield from _check_pixels(one, name)
    for option in ("cache", "cache_bytes") if not one.once else ():
        if getattr(one, option) != getattr(VisionSection, option):
            yield Problem(f"{name}.{option}", f"has no effect without {name}.once = true.")


def _check_pixels(one: VisionSection, name: str) -> Iterator[Problem]:
    if (one.least_pixels or one.most_pixels) and one.fit != "keep":
        yield Problem(f"{name}.least_pixels", 'and most_pixels are for fit = "keep".')
    if one.least_pixels > (one.most_pixels or one.size**2):
        yield Problem(f"{name}.least_pixels", f"expected at most {one.most_pixels or one.size**2}, the most pixels.")
