"""The file of a folder in Hugging Face layout that says how images become pixels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from forge_train import ConfigError

NAMES = {"image_mean": "mean", "image_std": "deviation"}
"""Key of the file → option of `[image]`."""
FIXED = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_pad": False,
    "resample": 3,
}
"""Keys with the only value that has a counterpart; 3 is bicubic."""
SHAPES = {"patch_size": "patch", "merge_size": "merge", "temporal_patch_size": "patch_frames"}
"""Key of the file → option of `[image]` that `vision_config` decides."""
KEPT = (56 * 56, 28 * 28 * 1280)
"""Fewest and most pixels of an image where no file says them."""


def read(beside: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `[image]` by the file for images; none without one.

    Args:
        beside: what `preprocessor_config.json` and `processor_config.json` say.
        options: of the encoder.

    Raises:
        ConfigError: naming a key whose value has no counterpart.
    """
    given = _given(beside)
    found = _values(given)
    side, size, crop = options["size"], given.get("size"), given.get("crop_size")
    if given.get("do_center_crop", True) and crop is not None:
        if _sides(crop) != {side}:
            raise _refused("crop_size", f"expected {side} × {side}, as vision_config has, found {crop!r}")
        shortest = size.get("shortest_edge") if isinstance(size, Mapping) else size
        if shortest not in (side, None):
            raise _refused("size", f"expected the shortest edge {side}, as vision_config has, found {size!r}")
        found["fit"] = "crop"
    elif size is not None and _sides(size) != {side}:
        raise _refused("size", f"expected {side} × {side}, as vision_config has, found {size!r}")
    return found


def read_kept(beside: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `[image]` by the file for images that keep their aspect within bounds of pixels, as in Qwen2-VL.

    Args:
        beside: as above.
        options: of the encoder.

    Raises:
        ConfigError: naming a key whose value has no counterpart.
    """
    given = _given(beside)
    size = given.get("size")
    edges = size if isinstance(size, Mapping) else {}
    for key, option in SHAPES.items():
        if given.get(key, options[option]) not in (options[option], None):
            raise _refused(key, f"expected {options[option]}, as vision_config has, found {given[key]!r}")
    least = given.get("min_pixels") or edges.get("shortest_edge") or edges.get("min_pixels") or KEPT[0]
    most = given.get("max_pixels") or edges.get("longest_edge") or edges.get("max_pixels") or KEPT[1]
    unit = options["patch"] * options["merge"]
    side = max(unit, math.isqrt(most) // unit * unit)
    return {
        **_values(given),
        "size": side,
        "least_pixels": min(least, most),
        "most_pixels": 0 if side**2 == most else most,
    }


def _given(beside: Mapping[str, Any]) -> dict[str, Any]:
    return {**beside, **(beside.get("image_processor") or {})}


def _values(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that say what numbers pixels become."""
    for key, value in FIXED.items():
        if given.get(key, value) not in (value, None):
            raise _refused(key, f"expected {value!r}, found {given[key]!r}")
    if abs(given.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-6:
        raise _refused("rescale_factor", f"expected 1/255, found {given['rescale_factor']}")
    return {option: list(given[key]) for key, option in NAMES.items() if given.get(key) is not None}


def _sides(size: Any) -> set[Any]:
    """Height and width, as one number or two."""
    return {size.get("height"), size.get("width")} if isinstance(size, Mapping) else {size}


def _refused(key: str, why: str) -> ConfigError:
    return ConfigError(f"preprocessor_config.json: {key}: {why}.")
