"""Images from files, by Pillow."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from forge_train import ConfigError
from forge_train_kit.modalities import ItemSource

_ORIENTATION = 0x0112
_TURNED = (5, 6, 7, 8)
"""Values of the EXIF tag that exchange width and height."""
_SEVERAL = ("MPO",)
"""Formats of photographs that carry previews or depth maps as further frames."""


@contextlib.contextmanager
def opened(source: ItemSource, max_bytes: int, max_pixels: int) -> Iterator[Image.Image]:
    """Open an image: one frame, within the limits. Nothing but its header is decoded.

    Raises:
        ConfigError: naming the file and the record; also for whatever fails to be decoded inside.
    """
    file = stream(source, max_bytes)
    try:
        with file, Image.open(file) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise ConfigError(
                    f"{source}: {width:,} × {height:,} pixels are more than max_pixels = {max_pixels:,}; raise it if "
                    "you trust the file."
                )
            frames = getattr(image, "n_frames", 1) if image.format not in _SEVERAL else 1
            if frames > 1:
                raise ConfigError(f"{source}: has {frames:,} frames, and an image must have one.")
            yield image
    except (ConfigError, MemoryError):
        raise
    except Image.DecompressionBombError as error:
        raise ConfigError(f"{source}: has more pixels than max_pixels = {max_pixels:,}.") from error
    except UnidentifiedImageError as error:
        raise ConfigError(f"{source}: is not an image that Pillow can read.") from error
    except Exception as error:  # decoders of broken files raise whatever they run into
        raise ConfigError(f"{source}: is damaged or cut short ({error}).") from error


def stream(source: ItemSource, max_bytes: int) -> BinaryIO:
    """An encoded item: its file, of which no more is read than is needed, or the bytes of a part of one.

    Raises:
        ConfigError: the file is missing, too long, or shorter than said.
    """
    size = length(source, max_bytes)
    try:
        if not source.offset and source.size is None:
            return Path(source.path).open("rb")
        with Path(source.path).open("rb") as file:
            file.seek(source.offset)
            data = file.read(size)
    except OSError as error:
        raise ConfigError(f"{source}: can't be read ({error.strerror}).") from error
    if len(data) < size:
        raise ConfigError(f"{source}: has {len(data):,} bytes where {size:,} were expected.")
    return io.BytesIO(data)


def length(source: ItemSource, max_bytes: int) -> int:
    """Bytes of an encoded item.

    Raises:
        ConfigError: the file is missing or empty, or the item too long.
    """
    path = Path(source.path)
    try:
        size = path.stat().st_size - source.offset if source.size is None else source.size
    except FileNotFoundError as error:
        raise ConfigError(f"{source}: there is no such file.") from error
    except OSError as error:
        raise ConfigError(f"{source}: can't be read ({error.strerror}).") from error
    if size > max_bytes:
        raise ConfigError(f"{source}: {size:,} bytes are more than max_bytes = {max_bytes:,}.")
    if size <= 0:
        raise ConfigError(f"{source}: is empty.")
    return size


def upright(image: Image.Image) -> tuple[int, int]:
    """Width and height, once the image is turned as its EXIF data says."""
    # Pillow exchanges those of a TIFF itself.
    turned = image.format != "TIFF" and image.getexif().get(_ORIENTATION) in _TURNED
    return image.size[::-1] if turned else image.size


def pixels(
    image: Image.Image,
    source: ItemSource,
    size: tuple[int, int] | None,
    *,
    crop: bool = False,
    resample: Image.Resampling = Image.Resampling.BICUBIC,
) -> NDArray[np.uint8]:
    """Decode an image, turn it upright, and resize it if a size is given: `[height, width, 3]`, red, green and blue.

    Transparency is laid over white. 16 bits are divided by 257.

    Raises:
        ConfigError: for values of an unknown range.
    """
    image.load()
    image = ImageOps.exif_transpose(image)
    image = _in_eight_bits(image, source)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.asarray(resized(image.convert("RGB"), size or image.size, crop=crop, resample=resample))


def resized(
    image: Image.Image,
    size: tuple[int, int],
    *,
    crop: bool,
    resample: Image.Resampling = Image.Resampling.BICUBIC,
) -> Image.Image:
    """The image with these sides; with `crop`, the middle of the image whose shorter side has as many pixels.

    The middle is resized alone: of a long strip, the whole would not fit into memory.
    """
    if image.size == size:
        return image
    if not crop:
        return image.resize(size, resample)
    (left, right), (top, bottom) = (_middle(*one, min(image.size)) for one in zip(image.size, size, strict=True))
    return image.resize(size, resample, box=(left, top, right, bottom))


def _middle(here: int, side: int, shorter: int) -> tuple[float, float]:
    """Of a side of the image, the part that becomes `side` pixels once the shorter one is resized to as many."""
    long = side * here // shorter
    start = (long - side) // 2
    return start * here / long, (start + side) * here / long


def _in_eight_bits(image: Image.Image, source: ItemSource) -> Image.Image:
    if image.mode not in ("I", "F") and not image.mode.startswith("I;16"):
        return image
    values = np.asarray(image)
    if image.mode == "F" or values.min() < 0 or values.max() > 0xFFFF:
        raise ConfigError(f"{source}: its values have 32 bits and no known range; store them in 8 or 16 bits.")
    shown = Image.fromarray((values.astype(np.float32) / 257).round().astype(np.uint8))
    if (clear := image.info.get("transparency")) is not None:
        shown.putalpha(Image.fromarray(np.where(values == clear, 0, 255).astype(np.uint8)))
    return shown
