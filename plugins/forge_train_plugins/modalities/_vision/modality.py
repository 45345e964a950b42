"""Items of the plugins, as models and data see them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forge_train_kit.modalities import Encoder, Grid, Item, ItemSource

from .patches import cut, fitted

if TYPE_CHECKING:
    from ..vision import Image


@dataclass
class Pictures:
    """Images: RGB patches of uint8."""

    config: Image.Config
    name: str = "image"
    placeholder: str = "<image>"

    def __post_init__(self) -> None:
        self.features = self.config.patch**2 * 3

    def public(self) -> Mapping[str, Any]:
        one = self.config
        return {"size": one.size, "patch": one.patch, "merge": one.merge, "fit": one.fit, "queries": one.queries}

    def measure(self, source: ItemSource) -> Grid:
        from .reading import opened, upright

        with opened(source, self.config.max_bytes, self.config.max_pixels) as image:
            return self._grid(*self._fitted(upright(image)))

    def read(self, source: ItemSource) -> Item:
        from .reading import opened, pixels, upright

        with opened(source, self.config.max_bytes, self.config.max_pixels) as image:
            size = self._fitted(upright(image))
            return Item(cut(pixels(image, source, size)[None], self.config.patch, self.config.merge), self._grid(*size))

    def positions(self, grid: Grid) -> int:
        frames, height, width = grid
        if self.config.queries:
            return self.config.queries
        return frames * height * width // self.config.merge**2

    def encoder(self, dim: int) -> Encoder:
        from .encoder import VisionEncoder

        return VisionEncoder(self.config, dim)

    def _fitted(self, size: tuple[int, int]) -> tuple[int, int]:
        one = self.config
        return fitted(*size, one.size, one.patch * one.merge, keep=one.fit == "keep")

    def _grid(self, width: int, height: int) -> Grid:
        return 1, height // self.config.patch, width // self.config.patch
