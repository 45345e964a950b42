"""The predicted cost of images that a class encodes itself."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor, nn

from forge_train import ConfigError


class Costs(nn.Module):
    """Stands where other modalities have an encoder: rows of images are spread by what it costs, in proportion to their
    numbers.

    Args:
        features: numbers of a patch.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features

    def flops(self, patches: int) -> int:
        return 2 * patches * self.features

    def forward(self, values: Tensor, grids: Tensor) -> NoReturn:
        raise ConfigError(
            "hf_images: images are encoded by a class of transformers; this model has an encoder of its own."
        )
