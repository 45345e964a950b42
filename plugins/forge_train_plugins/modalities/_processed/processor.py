"""A processor of `transformers`: images to the arguments of its class, and the text that stands for them."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from forge_train import ConfigError
from forge_train.base.errors import describe
from forge_train.base.format import format_list
from forge_train_kit.modalities import Grid

NAMED_IN = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
"""Files that may name the class of the processor."""
_REPLACED = "text_replacement_offsets"
_TEXT = ("input_ids", "attention_mask", "mm_token_type_ids", _REPLACED)
_READ = ("pixel_values", "image_grid_thw", "pixel_attention_mask")
_SIDE = 64
"""Side of the image by which a processor is tried."""


@dataclass(frozen=True)
class Processed:
    """An image as its class takes it."""

    values: NDArray[Any]
    """`[patches, features]`: patches, or whole tiles."""
    grid: Grid
    shape: tuple[int, ...]
    """Shape of one tile, after as many axes of 1 as the class has before the tiles; empty for patches."""
    text: str
    """The text that stands for the image."""


class Processor:
    """The processor that a folder describes.

    Raises:
        ConfigError: there is none, or its class asks for something that items can't hold.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        try:
            self._own = _loaded(self.folder)
            self.name = type(self._own).__name__
            self.token: str = getattr(self._own, "image_token", None) or ""
            self.tried = self(Image.new("RGB", (_SIDE, _SIDE)))
        except ConfigError:
            raise
        except Exception as error:  # whatever a processor makes of its files
            raise ConfigError(f"hf_images: the processor in {folder} can't be used: {describe(error)}") from error
        patches = math.prod(self.tried.grid)
        self.vectors = Fraction(self.tried.text.count(self.token), patches)
        """Feature vectors of a patch."""
        self.size_of = functools.lru_cache(4096)(self._size_of)

    def digest(self) -> str:
        """Of what the files say."""
        found = {name: _table(self.folder / name) for name in NAMED_IN[:2]}
        return hashlib.sha256(json.dumps([self.name, found], sort_keys=True).encode()).hexdigest()[:16]

    def __call__(self, image: Image.Image) -> Processed:
        """Process an image.

        Raises:
            ConfigError: the class takes more than items can hold.
        """
        found = self._own(images=[image], text=[self.token], return_tensors="np", return_text_replacement_offsets=True)
        if _REPLACED not in found:
            raise ConfigError(
                f"hf_images: {self.name} of transformers does not tell which text stands for an image ({_REPLACED})."
            )
        if strange := sorted(found.keys() - {*_TEXT, *_READ}):
            raise ConfigError(
                f"hf_images: {self.name} of transformers gives {format_list(strange)} beside pixels, which items can't "
                "hold."
            )
        pixels = np.asarray(found["pixel_values"])
        if not np.all(found.get("pixel_attention_mask", 1)):
            raise ConfigError(f"hf_images: {self.name} of transformers pads images, which items can't hold.")
        ((offset,),) = found[_REPLACED]
        if "image_grid_thw" in found and pixels.ndim == 2:
            ((time, height, width),) = found["image_grid_thw"].tolist()
            return Processed(pixels, (time, height, width), (), offset["replacement"])
        if "image_grid_thw" in found or pixels.ndim not in (4, 5):
            raise ConfigError(
                f"hf_images: {self.name} of transformers gives pixels of the shape {list(pixels.shape)}; expected "
                "tiles […, channels, height, width], or patches with a grid."
            )
        tiles = pixels.reshape(-1, math.prod(pixels.shape[-3:]))
        shape = (1,) * (pixels.ndim - 4), pixels.shape[-3:]
        return Processed(tiles, (len(tiles), 1, 1), (*shape[0], *shape[1]), offset["replacement"])

    def _size_of(self, width: int, height: int) -> tuple[Grid, str]:
        """The grid of an image of this size, and its text: those of a black one."""
        found = self(Image.new("RGB", (width, height)))
        if found.values.shape[1:] != self.tried.values.shape[1:] or found.shape != self.tried.shape:
            raise ConfigError(
                f"hf_images: {self.name} of transformers makes tiles of other sizes ({list(found.shape)}, and "
                f"{list(self.tried.shape)} of a square), which items can't hold."
            )
        if found.text.count(self.token) != math.prod(found.grid) * self.vectors:
            raise ConfigError(
                f"hf_images: {self.name} of transformers counts tokens by more than the number of patches, which items "
                "can't hold."
            )
        return found.grid, found.text


opened = functools.lru_cache(8)(Processor)


def _loaded(folder: Path) -> Any:
    """The folder's processor without its part for videos, which needs torchvision.

    Raises:
        ConfigError: no file names a processor.
    """
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    named = [_table(folder / name).get("processor_class") for name in NAMED_IN]
    named.append(PROCESSOR_MAPPING_NAMES.get(str(_table(folder / "config.json").get("model_type"))))
    name = next((one for one in named if isinstance(one, str) and hasattr(transformers, one)), None)
    if name is None:
        raise ConfigError(
            f"hf_images: no file in {folder} describes a processor of transformers, such as processor_config.json; "
            "copy the published model's files for images there."
        )
    if not (folder / NAMED_IN[1]).is_file() and "image_processor" not in _table(folder / NAMED_IN[0]):
        raise ConfigError(f"hf_images: {folder} has no {NAMED_IN[1]}; copy it from the published model.")
    kind: Any = getattr(transformers, name)
    made = {
        "image_processor": transformers.AutoImageProcessor,
        "feature_extractor": transformers.AutoFeatureExtractor,
        "tokenizer": transformers.AutoTokenizer,
    }
    parts = [made[part].from_pretrained(folder) if part in made else None for part in kind.get_attributes()]

    class WithoutVideos(kind):  # type: ignore[misc]
        def check_argument_for_proper_class(self, name: str, one: Any) -> Any:
            return None if one is None else super().check_argument_for_proper_class(name, one)

    WithoutVideos.__name__ = kind.__name__
    return WithoutVideos.from_args_and_dict(parts, kind.get_processor_dict(folder)[0])


def _table(file: Path) -> Mapping[str, Any]:
    """The content of a file in JSON; nothing where there is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"{file}: is not valid JSON: {error}.") from error
    return found if isinstance(found, Mapping) else {}
