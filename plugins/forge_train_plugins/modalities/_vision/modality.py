"""Items of the plugins, as models and data see them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forge_train_kit.modalities import Encoder, Grid, Item, ItemSource

from .patches import cut, kept

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
        self.features = self.config.patch**2 * 3
        self.placeholder = self.config.placeholder or self.placeholder

    def public(self) -> Mapping[str, Any]:
        one = self.config
        return _public(one, frames=one.frames, fps=one.fps, temporal=one.temporal, taken=TAKEN, times=one.times)

    def measure(self, source: ItemSource) -> Grid:
        from .clips import opened

        with opened(source, self.config) as clip:
            return _grid(self.config, self._frames(clip.seconds), *_size(self.config, clip.size))

    def smallest(self) -> Grid:
        return _grid(self.config, self._frames(0.0), *_size(self.config, (1, 1)))

    def read(self, source: ItemSource) -> Item:
        from .clips import opened, taken

        one = self.config
        with opened(source, one) as clip:
            size, count = _size(one, clip.size), self._frames(clip.seconds)
            at = times(clip.seconds, count)
            frames = taken(clip, at, size, crop=one.fit == "crop")
            return Item(cut(frames, one.patch, one.merge, one.temporal), _grid(one, count, *size), tuple(at))

    def texts(self, source: ItemSource) -> list[str]:
        """The time of each group of frames that are averaged, if it is to be written before them."""
        from .clips import opened

        if not self.config.times:
            return []
        with opened(source, self.config) as clip:
            at, size = times(clip.seconds, self._frames(clip.seconds)), self.config.temporal
        return [f"<{(at[one] + at[one + size - 1]) / 2:.1f} seconds>" for one in range(0, len(at), size)]

    def positions(self, grid: Grid) -> int:
        frames, height, width = grid
        return self.config.queries or frames * height * width // (self.config.merge**2 * self.config.temporal)

    def spread(self, grid: Grid) -> Grid | None:
        return _spread(self.config, grid, self.config.temporal)

    def example(self) -> Item:
        return _example(self.config, self.config.frames, self.features)

    def encoder(self, dim: int) -> Encoder:
        from .encoder import VisionEncoder

        return VisionEncoder(self.config, dim, self.config.temporal)

    def _frames(self, seconds: float) -> int:
        """The number of frames that are taken of a clip."""
        one = self.config
        if not one.fps:
            return one.frames
        wanted = max(1, round(seconds * one.fps / one.temporal)) * one.temporal
        return min(wanted, one.frames)


TAKEN = "middles of equal pieces"
"""The rule by which frames are taken; prepared data has it in its manifest."""


def times(seconds: float, count: int) -> list[float]:
    """Seconds from a clip's beginning at which frames are taken: the middles of pieces of equal length."""
    return [(index + 0.5) * seconds / count for index in range(count)]
