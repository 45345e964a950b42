"""Pictures made of the tokens that they replace, for the encoder of `image`. As `drawn:Drawn`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from forge_train import MASKED, Axes, Batch, BatchPhase, Job, Plugin, PrepareBatch, hookimpl
from forge_train_kit.modalities import Grid, extras_of

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
SQUARE = {"image.fit": "square", "image.connector": "resampler", "image.queries": 2, "image.merge": 1}
TILES = {
    "image_tiles.size": 4,
    "image_tiles.patch": 2,
    "image_tiles.dim": 16,
    "image_tiles.layers": 2,
    "image_tiles.global_layers": 1,
    "image_tiles.heads": 2,
    "image_tiles.outputs": [0],
    "image_tiles.std": 0.2,
    "cross_attention.every": 1,
    "cross_attention.gate": 0.5,
    "cross_attention.attend": "run",
}
GRIDS = ((1, 4, 4), (1, 2, 4), (1, 2, 2))


class Drawn(Plugin):
    """Puts a picture into most rows, two into some, and none into the others."""

    api = (1, 0)
    requires = ("image",)

    @hookimpl
    def prepare_batch(self, job: Job) -> PrepareBatch:
        return PrepareBatch(BatchPhase.MAKE, with_pictures)


class Squares(Drawn):
    """The same with `SQUARE`: all of one size, each at two places."""

    @hookimpl
    def prepare_batch(self, job: Job) -> PrepareBatch:
        return PrepareBatch(BatchPhase.MAKE, partial(with_pictures, grids=GRIDS[:1] * 3, most=2))


class Tiled(Drawn):
    """The same in tiles, each picture at one position, with `TILES`."""

    requires = ("image_tiles",)

    @hookimpl
    def prepare_batch(self, job: Job) -> PrepareBatch:
        return PrepareBatch(BatchPhase.MAKE, partial(with_pictures, most=1))


class Clips(Drawn):
    """The same with a clip in most rows beside, which the encoder of pictures takes two frames at a time."""

    requires = ("image", "video")

    @hookimpl
    def prepare_batch(self, job: Job) -> PrepareBatch:
        return PrepareBatch(BatchPhase.MAKE, with_clips)


def with_clips(batch: Batch) -> Batch:
    """The batch, with tokens after those of pictures replaced by clips of at most two pairs of frames."""
    batch = with_pictures(batch)
    rows, length = batch.inputs.shape
    values = torch.zeros(rows, 16, 24, dtype=torch.uint8)
    grids = torch.zeros(rows, 1, 3, dtype=torch.int64)
    places: Tensor = torch.full((rows, length), -1)
    for row, ids in enumerate(batch.inputs):
        pairs = int(ids[1]) % 3
        drawn = torch.Generator().manual_seed(int(ids[0]))
        values[row, : 8 * pairs] = torch.randint(0, 256, (8 * pairs, 24), generator=drawn).byte()
        grids[row, 0] = torch.tensor((pairs, 2, 4) if pairs else (0, 0, 0))
        places[row, 12 : 12 + 2 * pairs] = torch.arange(2 * pairs)
    return _placed(batch, "video", values, grids, places)


def with_pictures(batch: Batch, grids: tuple[Grid, ...] = GRIDS, most: int = 4) -> Batch:
    """The batch, with tokens replaced by pictures, of at most so many vectors."""
    rows, length = batch.inputs.shape
    values = torch.zeros(rows, 32, 12, dtype=torch.uint8)
    of_rows = torch.zeros(rows, 2, 3, dtype=torch.int64)
    places: Tensor = torch.full((rows, length), -1)
    for row, ids in enumerate(batch.inputs):
        seen = stored = 0
        for item in range(int(ids[0]) % 3):
            grid = grids[int(ids[item + 1]) % 3]
            patches, at = grid[1] * grid[2], 2 + 5 * item
            count = min(most, patches // 4)
            drawn = torch.Generator().manual_seed(int(ids[at]))
            values[row, stored : stored + patches] = torch.randint(0, 256, (patches, 12), generator=drawn).byte()
            of_rows[row, item] = torch.tensor(grid)
            places[row, at : at + count] = torch.arange(seen, seen + count)
            seen, stored = seen + count, stored + patches
    return _placed(batch, "image", values, of_rows, places)


def _placed(batch: Batch, name: str, values: Tensor, grids: Tensor, places: Tensor) -> Batch:
    names = extras_of(name)
    return replace(
        batch,
        inputs=batch.inputs.masked_fill(places >= 0, 0),
        labels=batch.labels.masked_fill(places >= 0, MASKED),
        extras={**batch.extras, **dict(zip(names, (values, grids, places), strict=True))},
        axes={**batch.axes, names[2]: Axes(batch=0, sequence=1)},
    )
