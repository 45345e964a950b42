"""Images for classes of `transformers`, as models and data see them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forge_train import ConfigError
from forge_train_kit import model_files
from forge_train_kit.modalities import Encoder, Grid, Item, ItemSource

if TYPE_CHECKING:
    from torch import Tensor

    from forge_train import Job

    from ..vision import HFImages
    from .processor import Processor


@dataclass
class ProcessedPictures:
    """Images as a folder's processor reads them: patches, or tiles."""

    config: HFImages.Config
    folder: str
    placeholder: str
    features: int
    name: str = "image"

    @classmethod
    def of(cls, config: HFImages.Config, job: Job) -> ProcessedPictures:
        """Those of a run.

        Raises:
            ConfigError: its tokenizer has no files, beside which those of a processor could be; or no processor fits.
        """
        from .processor import opened

        files = model_files.of(job.config, job.hooks, job.run.dir)
        if not files:
            raise ConfigError(
                "hf_images: there is no processor: it is read from the folder of the tokenizer, which this run lacks. "
                "Set hf.weights, hf.config or tokenizer.path to the folder of a published model."
            )
        folder = str(next(iter(files.values())).parent)
        processor = opened(folder)
        return cls(config, folder, processor.token, int(processor.tried.values.shape[1]))

    def public(self) -> Mapping[str, Any]:
        return {"processor": self._processor.digest()}

    def measure(self, source: ItemSource) -> Grid:
        return self._sized(source)[0]

    def written(self, source: ItemSource) -> str:
        return self._sized(source)[1]

    def read(self, source: ItemSource) -> Item:
        from PIL import Image

        from .._vision.reading import opened, pixels

        with opened(source, self.config.max_bytes, self.config.max_pixels) as image:
            found = self._processor(Image.fromarray(pixels(image, source, None)))
        return Item(found.values, found.grid)

    def positions(self, grid: Grid) -> int:
        return int(math.prod(grid) * self._processor.vectors)

    def example(self) -> Item:
        """A small image: it stands in for those that a batch lacks, too."""
        tried = self._processor.tried
        return Item(tried.values * 0 + 1, tried.grid)

    def keywords(self, values: Tensor, grids: Tensor) -> dict[str, Tensor]:
        """The arguments of the class."""
        shape = self._processor.tried.shape
        if not shape:
            return {"pixel_values": values, "image_grid_thw": grids}
        return {"pixel_values": values.view(*shape[:-3], len(values), *shape[-3:])}

    def encoder(self, dim: int) -> Encoder:
        from .costs import Costs

        return Costs(self.features)

    def _sized(self, source: ItemSource) -> tuple[Grid, str]:
        from .._vision.reading import opened, upright

        with opened(source, self.config.max_bytes, self.config.max_pixels) as image:
            size = upright(image)
        return self._processor.size_of(*size)

    @property
    def _processor(self) -> Processor:
        from .processor import opened

        return opened(self.folder)
