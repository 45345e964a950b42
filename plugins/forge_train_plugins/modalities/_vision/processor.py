"""The files of a folder in Hugging Face layout that say how images and clips become pixels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from forge_train import ConfigError

if TYPE_CHECKING:
    from forge_train_kit.hf import Tables

    from .section import VisionSection

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
IMAGES, CLIPS = "preprocessor_config.json", "video_preprocessor_config.json"
NESTED = "image_processor"
"""Key of `processor_config.json` that may hold what the file for images says."""
BOUNDS = ("size", "crop_size", "do_center_crop", "min_pixels", "max_pixels")
"""Keys that say the size of an image; some versions of the file have others of them."""
KEPT = (56 * 56, 28 * 28 * 1280)
"""Fewest and most pixels of an image where no file says them."""
PIXELS = (128 * 28 * 28, 768 * 28 * 28)
"""The same of a frame."""
FRAMES = (4, 768)
"""Fewest and most frames of a clip where no file says them."""
FPS = 2.0
"""Frames of a second where no file says them, as in Qwen's own code."""
Written = dict[str, dict[str, Any]]
"""Name of a file → its contents."""


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
    return {**_values(given), **_bounds(given, options, KEPT)}


def read_clips(beside: Mapping[str, Any], image: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `[video]` by the file for clips whose frames keep their aspect, as in Qwen2-VL.

    Without such a file, that for images counts, as in transformers.

    Args:
        beside: as above.
        image: options of `[image]`, whose encoder takes clips too.

    Raises:
        ConfigError: naming a key whose value has no counterpart.
    """
    given = dict(beside.get("video_processor") or beside)
    values, temporal, count = _values(given, CLIPS), image["patch_frames"], given.get("num_frames")
    for key, option in NAMES.items():
        if option in values and [*values[option]] != [*image[option]]:
            raise _refused(key, f"clips and images share one, {list(image[option])}; found {values[option]}", CLIPS)
    if given.get("cap_pixels_per_frame"):
        raise _refused("cap_pixels_per_frame", "a frame's pixels do not depend on the number of frames", CLIPS)
    sampled = {
        "fps": float(given.get("fps") or FPS),
        "least_frames": given.get("min_frames") or FRAMES[0],
        "frames": (given.get("max_frames") or FRAMES[1]) // temporal * temporal,
    }
    return {
        "fit": "keep",
        "temporal": temporal,
        "taken": "first",
        **(sampled if count is None else {"frames": max(round(count / temporal), 1) * temporal}),
        **_bounds(given, image, PIXELS, CLIPS),
    }


def _bounds(
    given: Mapping[str, Any], options: Mapping[str, Any], usual: tuple[int, int], file: str = IMAGES
) -> dict[str, Any]:
    """The options that say how large images become."""
    size = given.get("size")
    edges = size if isinstance(size, Mapping) else {}
    for key, option in SHAPES.items():
        if given.get(key, options[option]) not in (options[option], None):
            raise _refused(key, f"expected {options[option]}, as vision_config has, found {given[key]!r}", file)
    least = given.get("min_pixels") or edges.get("shortest_edge") or edges.get("min_pixels") or usual[0]
    most = given.get("max_pixels") or edges.get("longest_edge") or edges.get("max_pixels") or usual[1]
    unit = options["patch"] * options["merge"]
    side = max(unit, math.isqrt(most) // unit * unit)
    return {"size": side, "least_pixels": min(least, most), "most_pixels": 0 if side**2 == most else most}


def written(config: VisionSection, files: Tables) -> Written:
    """The files for images that do not say what `[image]` says, changed; a new one where there is none.

    Args:
        config: of the run.
        files: name → contents.
    """
    if _agree(config, {key: one for content in files.values() for key, one in content.items()}):
        return {}
    kind = "Qwen2VLImageProcessor" if config.fit == "keep" else "CLIPImageProcessor"
    new = {"image_processor_type": kind, **{key: one for key, one in FIXED.items() if key != "do_pad"}}
    return rewritten(files, partial(_changed, config), new)


def rewritten(files: Tables, change: Callable[[Mapping[str, Any]], dict[str, Any]], new: Mapping[str, Any]) -> Written:
    """The files for images, changed.

    Args:
        files: name → contents.
        change: of what is said of images.
        new: what is said of them, before the change, if no file says anything.
    """
    nested = {name: {**one, NESTED: change(one[NESTED])} for name, one in files.items() if one.get(NESTED)}
    given = files.get(IMAGES, {} if nested else new)
    return {**nested, **({IMAGES: change(given)} if given else {})}


def _agree(config: VisionSection, beside: Mapping[str, Any]) -> bool:
    """True if files say all that they must, and the same as the run."""
    kept, side = config.fit == "keep", config.size
    options = {"size": side, "patch": config.patch, "merge": config.merge, "patch_frames": config.patch_frames}
    try:
        found = read_kept(beside, options) if kept else {"fit": "square", **read(beside, options)}
    except ConfigError:  # they have another size
        return False
    wanted: dict[str, Any] = {"mean": [*config.mean], "deviation": [*config.deviation]}
    if kept:
        found["most_pixels"] = found["most_pixels"] or found["size"] ** 2
        wanted |= {"least_pixels": max(config.least_pixels, 1), "most_pixels": config.most_pixels or side**2}
    else:
        wanted["fit"] = config.fit
    return "size" in _given(beside) and all(found.get(name) == one for name, one in wanted.items())


def _changed(config: VisionSection, given: Mapping[str, Any]) -> dict[str, Any]:
    """A file for images, with what `[image]` says."""
    square = {"height": config.size, "width": config.size}
    if config.fit == "keep":
        bounds = {"shortest_edge": max(config.least_pixels, 1), "longest_edge": config.most_pixels or config.size**2}
        wanted: dict[str, Any] = {"size": bounds, **{key: getattr(config, one) for key, one in SHAPES.items()}}
    elif config.fit == "crop":
        wanted = {"size": {"shortest_edge": config.size}, "do_center_crop": True, "crop_size": square}
    else:
        wanted = {"size": square, "do_center_crop": False}
    if "image_seq_length" in given:
        wanted["image_seq_length"] = (config.size // config.patch) ** 2
    others = {key: one for key, one in given.items() if key not in BOUNDS}
    return {**others, **wanted, **{key: [*getattr(config, one)] for key, one in NAMES.items()}}


def _given(beside: Mapping[str, Any]) -> dict[str, Any]:
    return {**beside, **(beside.get(NESTED) or {})}


def _values(given: Mapping[str, Any], file: str = IMAGES) -> dict[str, Any]:
    """The options that say what numbers pixels become."""
    for key, value in FIXED.items():
        if given.get(key, value) not in (value, None):
            raise _refused(key, f"expected {value!r}, found {given[key]!r}", file)
    if abs(given.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-6:
        raise _refused("rescale_factor", f"expected 1/255, found {given['rescale_factor']}", file)
    return {option: list(given[key]) for key, option in NAMES.items() if given.get(key) is not None}


def _sides(size: Any) -> set[Any]:
    """Height and width, as one number or two."""
    return {size.get("height"), size.get("width")} if isinstance(size, Mapping) else {size}


def _refused(key: str, why: str, file: str = IMAGES) -> ConfigError:
    return ConfigError(f"{file}: {key}: {why}.")
