"""The folder of a vision model of `transformers`, as configurations see it. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_train import ConfigError, Problem
from forge_train.base.files import load_json

if TYPE_CHECKING:
    from .section import VisionSection

KEYS = {"dim": "hidden_size", "heads": "num_attention_heads", "patch": "patch_size", "size": "image_size"}
"""Option → key of the `config.json`, or of the `vision_config` in it."""
VALUES = {"mean": "image_mean", "deviation": "image_std"}
"""Option → key of the file for images."""
FILES = ("processor_config.json", "preprocessor_config.json")
OWN = (
    *("layers", "hidden", "activation", "gated", "norm", "norm_eps", "norm_place", "window", "full_layers"),
    *("bias", "patch_bias", "patch_frames", "class_token", "first_norm", "final_norm", "positions"),
)
"""Options of the encoder that a borrowed one does not have."""


def implied(folder: str) -> dict[str, Any]:
    """The options that a folder decides; none where there is none.

    Raises:
        ConfigError: it describes no vision transformer.
    """
    if not folder or not (whole := _table(Path(folder) / "config.json")):
        return {}
    inner = whole.get("vision_config")
    config = inner if isinstance(inner, Mapping) else whole
    found: dict[str, Any] = {}
    for option, key in KEYS.items():
        value = config.get(key)
        if isinstance(value, list) and len({*map(str, value)}) == 1:  # height and width
            value = value[0]
        if not isinstance(value, int):
            raise ConfigError(f"{folder}/config.json: {key}: expected a number, as a vision transformer has.")
        found[option] = value
    given: dict[str, Any] = {}
    for name in FILES:
        one = _table(Path(folder) / name)
        given |= {**one, **(one.get("image_processor") or {})}
    return {**found, **{option: list(given[key]) for option, key in VALUES.items() if given.get(key)}}


def check_borrowed(one: VisionSection, name: str) -> Iterator[Problem]:
    """Rules for a section whose encoder is that of a folder."""
    usual = type(one)()
    for option in OWN:
        if getattr(one, option) != getattr(usual, option):
            yield Problem(f"{name}.{option}", f"has no effect, since {name}.model decides it.")
    if one.fit == "keep":
        yield Problem(f"{name}.fit", f'expected "square" or "crop" with {name}.model, which takes images of one size.')
    if not (found := implied(one.model)):
        yield Problem(f"{name}.model", f"there is no config.json in {one.model}.", data=True)
        return
    for option in ("dim", "patch"):
        if getattr(one, option) != found[option]:
            yield Problem(f"{name}.{option}", f"expected {found[option]}, as {name}.model has.")


def _table(file: Path) -> Mapping[str, Any]:
    """The content of a file; nothing where there is none."""
    if not file.is_file():
        return {}
    try:
        found = load_json(file, most=1 << 24, links=True)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{file}: can't be read: {why}.") from error
    return found if isinstance(found, Mapping) else {}
