"""A third party's modality, scans of a few numbers a patch, among the tokens of any text. As `scans:Scans`."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_train import MASKED, Axes, Batch, BatchPhase, ConfigError, Job, Plugin, PrepareBatch, hookimpl
from forge_train_kit.modalities import Encoder, Grid, Item, ItemSource, Modality, extras_of
from forge_train_kit.model import LayerNorm, Linear

FEATURES = 3
MOST = 3
"""Items of a row at most."""


class ScanEncoder(nn.Module):
    """Two layers in which the patches of an item see each other, and no others.

    Args:
        dim: width of the features.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.embed = Linear(FEATURES, 16, bias=True, std=0.5)
        self.layers = nn.ModuleList(Mixer(16) for _ in range(2))
        self.connector = Linear(16, dim, std=0.5)

    units = ("layers.0", "layers.1")

    def forward(self, values: Tensor, grids: Tensor) -> Tensor:
        ends = grids.prod(-1).cumsum(-1)
        item = (torch.arange(values.shape[1], device=values.device)[None, :, None] >= ends[:, None]).sum(-1)
        same = (item[:, :, None] == item[:, None]).to(self.embed.weight.dtype)
        x = self.embed(values.to(self.embed.weight.dtype))
        for layer in self.layers:
            x = layer(x, same)
        features: Tensor = self.connector(x)
        return features


class Mixer(nn.Module):
    """A mean over the patches of the item."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = LayerNorm(dim)
        self.mix = Linear(dim, dim, std=0.5)

    def forward(self, x: Tensor, same: Tensor) -> Tensor:
        mixed: Tensor = self.mix(same @ self.norm(x)) / same.sum(-1, keepdim=True)
        return x + mixed


class Scan:
    """Modality with one feature vector for each `merge` patches, rounded up."""

    features = FEATURES

    def __init__(self, name: str = "scan", merge: int = 1) -> None:
        self.name, self.merge = name, merge
        self.placeholder = f"<{name}>"

    def public(self) -> Mapping[str, Any]:
        return {"merge": self.merge}

    def measure(self, source: ItemSource) -> Grid:
        return self.read(source).grid

    def read(self, source: ItemSource) -> Item:
        with Path(source.path).open("rb") as file:
            file.seek(source.offset)
            content = file.read() if source.size is None else file.read(source.size)
        if content.startswith(b"broken"):
            raise ConfigError(f"{source}: a broken scan.")
        values = np.load(io.BytesIO(content))
        return Item(values, (1, 1, len(values)))

    def smallest(self) -> Grid:
        return (1, 1, 1)

    def positions(self, grid: Grid) -> int:
        return -(-grid[2] // self.merge)

    def encoder(self, dim: int) -> Encoder:
        return ScanEncoder(dim)


class Scans(Plugin):
    """Puts scans, made of the tokens that they replace, into each row: none into some, several into others."""

    api = (1, 0)
    requires = ("fusion",)

    @hookimpl
    def modalities(self, job: Job) -> Iterable[Modality]:
        return [Scan()]

    @hookimpl
    def prepare_batch(self, job: Job) -> PrepareBatch:
        one_token = job.hooks.gives("fusion") == "token"
        return PrepareBatch(BatchPhase.MAKE, partial(with_scans, one_token=one_token))


def with_scans(batch: Batch, *, one_token: bool = False) -> Batch:
    """The batch, with the tokens at some places replaced by scans of them, or the first of these by a placeholder."""
    rows, length = batch.inputs.shape
    grids = torch.zeros(rows, MOST, 3, dtype=torch.int64)
    places = torch.full((rows, length), -1)
    values: list[Tensor] = []
    for row, ids in enumerate(batch.inputs):
        at = seen = 0
        numbers: list[Tensor] = []
        for item in range(int(ids[0]) % (MOST + 1)):
            size = 2 + int(ids[item]) % 3
            width = 1 if one_token else size
            at += 1 + int(ids[item + 1]) % 4
            if at + size > length:
                break
            grids[row, item] = torch.tensor((1, 1, size))
            places[row, at : at + width] = torch.arange(width) + (item if one_token else seen)
            numbers.append(torch.sin(ids[at : at + size, None] * torch.arange(1, FEATURES + 1)))
            at, seen = at + width, seen + size
        values.append(torch.cat([*numbers, torch.zeros(0, FEATURES)]))
    most = max(1, *(len(one) for one in values))
    padded = torch.stack([F.pad(one, (0, 0, 0, most - len(one))) for one in values])
    names = extras_of("scan")
    return replace(
        batch,
        inputs=batch.inputs.masked_fill(places >= 0, 0),
        labels=batch.labels.masked_fill((places >= 0) | F.pad(places[:, 1:] >= 0, (0, 1)), MASKED),
        extras={**batch.extras, **dict(zip(names, (padded, grids, places), strict=True))},
        axes={**batch.axes, names[2]: Axes(batch=0, sequence=1)},
    )


class MoreScans(Scans):
    """The same modality once more."""
