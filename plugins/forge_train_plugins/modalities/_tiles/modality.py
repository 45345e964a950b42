"""Images in tiles, as models and data see them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forge_train_kit.modalities import Encoder, Grid, Item, ItemSource

from .canvas import arranged, placed

if TYPE_CHECKING:
    from .section import TileSection


@dataclass
class TiledPictures:
    """Images: RGB patches of uint8, one tile after the other; the grid is that of all tiles' patches."""

    config: TileSection
    name: str = "image"
    placeholder: str = "<|image|>"

    def __post_init__(self) -> None:
        self.features = self.config.patch**2 * 3
        self.side = self.config.size // self.config.patch

    def public(self) -> Mapping[str, Any]:
        return {name: getattr(self.config, name) for name in ("size", "tiles", "patch")}

    def measure(self, source: ItemSource) -> Grid:
        from .._vision.reading import opened, upright

        with opened(source, self.config.max_bytes, self.config.max_pixels) as image:
            return self._grid(*arranged(*upright(image), self.config.size, self.config.tiles))

    def read(self, source: ItemSource) -> Item:
        import numpy as np
        from PIL import Image

        from .._vision.patches import cut
        from .._vision.reading import opened, pixels, upright

        one = self.config
        with opened(source, one.max_bytes, one.max_pixels) as image:
            shape = upright(image)
            rows, columns = arranged(*shape, one.size, one.tiles)
            width, height = placed(*shape, one.size, (rows, columns))
            canvas = np.zeros((rows * one.size, columns * one.size, 3), np.uint8)
            canvas[:height, :width] = pixels(image, source, (width, height), resample=Image.Resampling.BILINEAR)
        tiles = canvas.reshape(rows, one.size, columns, one.size, 3).swapaxes(1, 2)
        return Item(cut(tiles.reshape(-1, one.size, one.size, 3), one.patch, 1), self._grid(rows, columns))

    def smallest(self) -> Grid:
        return self._grid(1, 1)

    def example(self) -> Item:
        import numpy as np

        grid = self._grid(1, self.config.tiles)
        return Item(np.zeros((grid[1] * grid[2], self.features), np.uint8), grid)

    def positions(self, grid: Grid) -> int:
        patches = grid[0] * grid[1] * grid[2]
        return patches + patches // self.side**2

    def encoder(self, dim: int) -> Encoder:
        from .encoder import TileEncoder

        return TileEncoder(self.config, dim)

    def _grid(self, rows: int, columns: int) -> Grid:
        return 1, rows * self.side, columns * self.side
