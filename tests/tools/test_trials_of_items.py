"""`plugins check` of a modality: an encoder whose items see each other, or the padding, is found."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import scans
from forge_train import Job, Plugin, hookimpl
from forge_train_kit.modalities import Encoder, Modality
from forge_train_tools.testing.conformance import check


def found(plugin: type[Plugin], folder: Path) -> tuple[str, str]:
    (one,) = [one for one in check(plugin, folder=folder).checks if "keeps items apart" in one.name]
    return one.status, one.detail


class Together(scans.ScanEncoder):
    """Adds the mean of the row, padding included."""

    def forward(self, values: Tensor, grids: Tensor) -> Tensor:
        features = super().forward(values, grids)
        return features + features.mean(1, keepdim=True)


class NotFinite(scans.ScanEncoder):
    """Divides by the number of patches."""

    def forward(self, values: Tensor, grids: Tensor) -> Tensor:
        return super().forward(values, grids) / grids.prod(-1).sum(-1)[:, None, None].float()


class Doubled(scans.Scan):
    """Says that its vectors lie in two frames."""

    def spread(self, grid: Any) -> Any:
        return (2, *grid[1:])


class TwoEach(scans.Scan):
    """Says that an item takes two positions more than it does."""

    def positions(self, grid: Any) -> int:
        return super().positions(grid) + 2


class Odd(scans.Scan):
    def __init__(self, encoder: type[Any]) -> None:
        super().__init__()
        self.made = encoder

    def encoder(self, dim: int) -> Encoder:
        built: Encoder = self.made(dim)
        return built


def plugin_of(modality: Modality) -> type[Plugin]:
    class Given(scans.Scans):
        """Gives a modality."""

        @hookimpl
        def modalities(self, job: Job) -> Iterable[Modality]:
            return [modality]

    return Given


@pytest.mark.slow
def test_a_sound_modality_passes(tmp_path: Path) -> None:
    status, detail = found(scans.Scans, tmp_path)
    assert status == "ok", detail
    assert " of scan" in detail


@pytest.mark.parametrize(
    ("modality", "words"),
    [
        (Odd(Together), "an item beside others, and alone"),
        (Odd(NotFinite), "not finite"),
        (TwoEach(), "and positions() says"),
        (Doubled(), "and spread() says (2, 1, "),
    ],
)
def test_a_fault_is_named(modality: Modality, words: str, tmp_path: Path) -> None:
    status, detail = found(plugin_of(modality), tmp_path)
    assert status == "fail", detail
    assert words in detail
    assert torch.is_grad_enabled()


def test_without_items_nothing_is_tried(tmp_path: Path) -> None:
    class Bare(Plugin):
        """Gives a modality, and no items."""

        api = (1, 0)
        requires = ("fusion",)

        @hookimpl
        def modalities(self, job: Job) -> Iterable[Modality]:
            return [scans.Scan()]

    status, detail = found(Bare, tmp_path)
    assert status == "skip", detail
    assert "has no item" in detail
