"""The file of a folder in Hugging Face layout that says how images become tiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from forge_train import ConfigError

from .._vision.processor import Written, rewritten

if TYPE_CHECKING:
    from forge_train_kit.hf import Tables

    from .section import TileSection

NAMES = {"image_mean": "mean", "image_std": "deviation"}
"""Key of the file → option of `[image_tiles]`."""
KIND = "MllamaImageProcessor"
FIXED = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_pad": True, "resample": 2}
"""Keys with the only value that has a counterpart; 2 is bilinear."""


def read(beside: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `[image_tiles]` by the file for images; none without one.

    Args:
        beside: what `preprocessor_config.json` and `processor_config.json` say.
        options: of the encoder.

    Raises:
        ConfigError: naming a key whose value has no counterpart.
    """
    given = {**beside, **(beside.get("image_processor") or {})}
    side = options["size"]
    wanted = {**FIXED, "size": {"height": side, "width": side}, "max_image_tiles": options["tiles"]}
    for key, value in wanted.items():
        if given.get(key, value) not in (value, None):
            raise ConfigError(f"preprocessor_config.json: {key}: expected {value!r}, found {given[key]!r}.")
    if abs(given.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-6:
        raise ConfigError(f"preprocessor_config.json: rescale_factor: expected 1/255, found {given['rescale_factor']}.")
    return {option: list(given[key]) for key, option in NAMES.items() if given.get(key) is not None}


def written(config: TileSection, files: Tables) -> Written:
    """The files for images that do not say what `[image_tiles]` says, changed; a new one where there is none.

    Args:
        config: of the run.
        files: name → contents.
    """
    wanted = {
        "size": {"height": config.size, "width": config.size},
        "max_image_tiles": config.tiles,
        **{key: [*getattr(config, option)] for key, option in NAMES.items()},
    }
    given = {key: one for content in files.values() for key, one in content.items()}
    given |= given.get("image_processor") or {}
    if all(given.get(key) == one for key, one in wanted.items()):
        return {}
    return rewritten(files, lambda found: {**found, **wanted}, {"image_processor_type": KIND, **FIXED})
