"""Items of the plugins, as models and data see them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from forge_train import ConfigError
from forge_train_kit.modalities import Encoder, Grid, Item, ItemSource

from .patches import cut, kept
from .section import ENCODER

if TYPE_CHECKING:
    from ..vision import Image, Video
    from .section import VisionSection


def _public(config: VisionSection, **more: Any) -> dict[str, Any]:
    names = ("size", "patch", "merge", "fit", "queries")
    bounds = {name: bound for name in ("least_pixels", "most_pixels") if (bound := getattr(config, name))}
    return {**{name: getattr(config, name) for name in names}, **bounds, **more}


def _size(config: VisionSection, size: tuple[int, int]) -> tuple[int, int]:
    if config.fit != "keep":
        return config.size, config.size
    return kept(*size, config.patch * config.merge, config.least_pixels, config.most_pixels or config.size**2)


def _example(config: VisionSection, frames: int, features: int) -> Item:
    """The largest item: a square."""
    import numpy as np

    grid = _grid(config, frames, config.size, config.size)
    return Item(np.zeros((grid[0] * grid[1] * grid[2], features), np.uint8), grid)


def _grid(config: VisionSection, frames: int, width: int, height: int) -> Grid:
    return frames, height // config.patch, width // config.patch


def _spread(config: VisionSection, grid: Grid, temporal: int) -> Grid | None:
    """Vectors along each axis; None for those of queries, which stand for the whole item."""
    frames, height, width = grid
    return None if config.queries else (frames // temporal, height // config.merge, width // config.merge)


@dataclass
class Pictures:
    """Images: RGB patches of uint8."""

    config: Image.Config
    name: str = "image"
    placeholder: str = "<image>"

    def __post_init__(self) -> None:
        self.features = self.config.patch**2 * 3
        self.placeholder = self.config.placeholder or self.placeholder

    def public(self) -> Mapping[str, Any]:
        return _public(self.config)

    def measure(self, source: ItemSource) -> Grid:
        from .reading import opened, upright

        with opened(source, self.config.max_bytes, self.config.max_pixels) as image:
            return _grid(self.config, 1, *_size(self.config, upright(image)))

    def smallest(self) -> Grid:
        return _grid(self.config, 1, *_size(self.config, (1, 1)))

    def read(self, source: ItemSource) -> Item:
        from .reading import opened, pixels, upright

        one = self.config
        with opened(source, one.max_bytes, one.max_pixels) as image:
            size = _size(one, upright(image))
            return Item(
                cut(pixels(image, source, size, crop=one.fit == "crop")[None], one.patch, one.merge),
                _grid(one, 1, *size),
            )

    def positions(self, grid: Grid) -> int:
        frames, height, width = grid
        return self.config.queries or frames * height * width // self.config.merge**2

    def spread(self, grid: Grid) -> Grid | None:
        return _spread(self.config, grid, 1)

    def example(self) -> Item:
        return _example(self.config, 1, self.features)

    def encoder(self, dim: int) -> Encoder:
        from .encoder import VisionEncoder

        return VisionEncoder(self.config, dim)


@dataclass
class Clips:
    """Video clips: RGB patches of the frames that were taken, uint8."""

    config: Video.Config
    name: str = "video"
    placeholder: str = "<video>"

    def __post_init__(self) -> None:
        self.features = self.config.patch**2 * 3 * self.config.patch_frames
        self.placeholder = self.config.placeholder or self.placeholder

    @property
    def encoded_by(self) -> str:
        return "" if self.config.encoded_by == self.name else self.config.encoded_by

    def joined(self, owner: Any) -> Clips:
        """The same clips, as the encoder of images takes them: as many frames as it projects at a time are one."""
        theirs, one = owner.config, self.config
        if one.temporal != theirs.patch_frames:
            raise ConfigError(
                f"video.temporal: expected image.patch_frames = {theirs.patch_frames}, the frames that the encoder of "
                "images projects at a time."
            )
        if one.fit != theirs.fit or (one.fit != "keep" and one.size != theirs.size):
            raise ConfigError("video.fit and video.size: expected those of images, whose encoder clips share.")
        if one.size % (theirs.patch * theirs.merge):
            raise ConfigError(
                f"video.size: expected a multiple of image.patch · merge = {theirs.patch * theirs.merge}."
            )
        if one.times and theirs.queries:
            raise ConfigError("video.times: has no effect with a resampler, whose queries stand for a whole clip.")
        shared = {name: getattr(theirs, name) for name in ENCODER}
        return replace(self, config=replace(one, **shared))

    def public(self) -> Mapping[str, Any]:
        one = self.config
        more = {name: value for name in ("least_frames", "positions_per_second") if (value := getattr(one, name))}
        more |= {"encoded_by": self.encoded_by} if self.encoded_by else {}
        return _public(
            one, frames=one.frames, fps=one.fps, temporal=one.temporal, taken=TAKEN[one.taken], times=one.times, **more
        )

    def measure(self, source: ItemSource) -> Grid:
        from .clips import opened

        with opened(source, self.config) as clip:
            return self._grid(self._frames(clip.seconds), *_size(self.config, clip.size))

    def smallest(self) -> Grid:
        return self._grid(self._frames(0.0), *_size(self.config, (1, 1)))

    def read(self, source: ItemSource) -> Item:
        from .clips import opened, taken

        one = self.config
        with opened(source, one) as clip:
            size, count = _size(one, clip.size), self._frames(clip.seconds)
            at = times(clip.seconds, count, one.taken)
            frames = taken(clip, at, size, crop=one.fit == "crop")
            patches = cut(frames, one.patch, one.merge, one.temporal, together=bool(self.encoded_by))
            return Item(patches, self._grid(count, *size), tuple(at))

    def pace(self, source: ItemSource) -> float:
        """Positions along time from one group of frames to the next."""
        from .clips import opened

        one = self.config
        if not one.positions_per_second:
            return 1.0
        with opened(source, one) as clip:
            return one.positions_per_second * one.temporal * clip.seconds / self._frames(clip.seconds)

    def texts(self, source: ItemSource) -> list[str]:
        """The time of each group of frames that are averaged, if it is to be written before them."""
        from .clips import opened

        if not self.config.times:
            return []
        with opened(source, self.config) as clip:
            at, size = times(clip.seconds, self._frames(clip.seconds), self.config.taken), self.config.temporal
        return [f"<{(at[one] + at[one + size - 1]) / 2:.1f} seconds>" for one in range(0, len(at), size)]

    def positions(self, grid: Grid) -> int:
        frames, height, width = grid
        return self.config.queries or frames * height * width // (self.config.merge**2 * self._averaged)

    def spread(self, grid: Grid) -> Grid | None:
        return _spread(self.config, grid, self._averaged)

    def example(self) -> Item:
        return _example(self.config, self._grid(self.config.frames, 0, 0)[0], self.features)

    def encoder(self, dim: int) -> Encoder:
        from .encoder import VisionEncoder

        return VisionEncoder(self.config, dim, self.config.temporal)

    @property
    def _averaged(self) -> int:
        """Frames whose features are averaged; an encoder of images projects as many at a time."""
        return 1 if self.encoded_by else self.config.temporal

    def _grid(self, count: int, width: int, height: int) -> Grid:
        frames = count // self.config.temporal * self._averaged
        return _grid(self.config, frames, width, height)

    def _frames(self, seconds: float) -> int:
        """The number of frames that are taken of a clip."""
        one = self.config
        if not one.fps:
            return one.frames
        pieces = max(seconds * one.fps, one.least_frames) / one.temporal
        whole = round(pieces) if one.taken == "middle" else math.floor(pieces)
        return min(max(1, whole) * one.temporal, one.frames)


TAKEN = {"middle": "middles of equal pieces", "first": "beginnings of equal pieces"}
"""The rules by which frames are taken; prepared data has one in its manifest."""


def times(seconds: float, count: int, taken: str = "middle") -> list[float]:
    """Seconds from a clip's beginning at which frames are taken: of pieces of equal length, the middle or the first."""
    return [(index + (0.5 if taken == "middle" else 0.0)) * seconds / count for index in range(count)]
