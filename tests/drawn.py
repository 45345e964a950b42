"""Pictures made of the tokens that they replace, for the encoder of `image`. As `drawn:Drawn`."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from forge_train import MASKED, Axes, Batch, BatchPhase, Job, Plugin, PrepareBatch, hookimpl
from forge_train_kit.modalities import extras_of

OPTIONS = {
    "image.size": 8,
    "image.patch": 2,
    "image.merge": 2,
    "image.fit": "keep",
    "image.dim": 16,
    "image.layers": 2,
    "image.heads": 2,
    "image.std": 0.2,
}
GRIDS = ((1, 4, 4), (1, 2, 4), (1, 2, 2))


class Drawn(Plugin):
    """Puts a picture into most rows, two into some, and none into the others."""

    api = (1, 0)
    requires = ("image",)

    @hookimpl
    def prepare_batch(self, job: Job) -> PrepareBatch:
        return PrepareBatch(BatchPhase.MAKE, with_pictures)


def with_pictures(batch: Batch) -> Batch:
    """The batch, with tokens replaced by pictures."""
    rows, length = batch.inputs.shape
    values = torch.zeros(rows, 32, 12, dtype=torch.uint8)
    grids = torch.zeros(rows, 2, 3, dtype=torch.int64)
    places: Tensor = torch.full((rows, length), -1)
    for row, ids in enumerate(batch.inputs):
        seen = 0
        for item in range(int(ids[0]) % 3):
            grid = GRIDS[int(ids[item + 1]) % 3]
            patches, at = grid[1] * grid[2], 2 + 5 * item
            drawn = torch.Generator().manual_seed(int(ids[at]))
            values[row, 4 * seen : 4 * seen + patches] = torch.randint(0, 256, (patches, 12), generator=drawn).byte()
            grids[row, item] = torch.tensor(grid)
            places[row, at : at + patches // 4] = torch.arange(seen, seen + patches // 4)
            seen += patches // 4
    names = extras_of("image")
    return replace(
        batch,
        inputs=batch.inputs.masked_fill(places >= 0, 0),
        labels=batch.labels.masked_fill(places >= 0, MASKED),
        extras={**batch.extras, **dict(zip(names, (values, grids, places), strict=True))},
        axes={**batch.axes, names[2]: Axes(batch=0, sequence=1)},
    )
