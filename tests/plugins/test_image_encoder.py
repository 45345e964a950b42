"""The encoder of images: rows, items and padding never see each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fakes
from forge_train_plugins.modalities._vision.encoder import VisionEncoder
from forge_train_plugins.modalities._vision.modality import Pictures
from forge_train_plugins.modalities._vision.places import places
from forge_train_plugins.modalities._vision.transformer import LearnedPositions, Places
from forge_train_plugins.modalities.vision import Image

pytestmark = pytest.mark.unit

SMALL = {"size": 16, "patch": 4, "merge": 2, "dim": 16, "layers": 2, "heads": 2, "hidden": 24, "std": 0.3}
MODES: dict[str, dict[str, Any]] = {
    "square": {},
    "keep": {"fit": "keep"},
    "class token": {"class_token": True, "first_norm": True, "patch_bias": False, "activation": "quick_gelu"},
    "linear": {"connector": "linear", "final_norm": False, "bias": False},
}
each_mode = pytest.mark.parametrize("mode", MODES)


def encoder(mode: str) -> VisionEncoder:
    """An encoder in fp64, of width 8, built without memory as models are."""
    with torch.device("meta"):
        built: Any = Pictures(Image.Config(**SMALL, **MODES[mode])).encoder(8)
    built.to_empty(device="cpu").vision.pixels.reset_buffers()
    return fakes.initialised(built).double()


def items(mode: str) -> list[tuple[tuple[int, int, int], Tensor]]:
    """Three images, as grid and patches."""
    torch.manual_seed(1)
    grids = [(1, 4, 2), (1, 2, 2), (1, 2, 6)] if MODES[mode].get("fit") == "keep" else [(1, 4, 4)] * 3
    return [(grid, torch.randint(0, 256, (grid[1] * grid[2], 48), dtype=torch.uint8)) for grid in grids]


def batch(rows: list[list[tuple[tuple[int, int, int], Tensor]]], room: int = 0) -> tuple[Tensor, Tensor]:
    """Values and grids of rows of items, with at least so many patches."""
    patches = max(room, *(sum(len(values) for _, values in row) for row in rows))
    values = torch.zeros(len(rows), patches, 48, dtype=torch.uint8)
    grids = torch.zeros(len(rows), max(len(row) for row in rows), 3, dtype=torch.int64)
    for number, row in enumerate(rows):
        of_row = torch.cat([values.new_zeros(0, 48), *(one for _, one in row)])
        values[number, : len(of_row)] = of_row
        for at, (grid, _) in enumerate(row):
            grids[number, at] = torch.tensor(grid)
    return values, grids


def gradients(built: VisionEncoder, given: tuple[Tensor, Tensor], counts: list[int]) -> dict[str, Tensor]:
    """Of a sum over the first features of each row, each with a weight of its own."""
    built.zero_grad()
    out = built(*given)
    torch.manual_seed(2)
    loss = sum(
        (row[:count] * torch.randn(count, 8, dtype=row.dtype)).sum() for row, count in zip(out, counts, strict=True)
    )
    loss.backward()
    return {name: p.grad.clone() for name, p in built.named_parameters()}


@each_mode
def test_an_item_has_the_same_features_wherever_it_is(mode: str) -> None:
    built, (one, two, three) = encoder(mode), items(mode)
    alone = [built(*batch([[item]]))[0] for item in (one, two, three)]
    counts = [len(values) // 4 for _, values in (one, two, three)]
    assert [len(features) for features in alone] == counts
    packed = built(*batch([[two, one], [three]], room=60))
    torch.testing.assert_close(packed[0, : counts[1] + counts[0]], torch.cat((alone[1], alone[0])))
    torch.testing.assert_close(packed[1, : counts[2]], alone[2])


@each_mode
def test_padding_changes_no_feature_and_no_gradient(mode: str) -> None:
    built, (one, two, three) = encoder(mode), items(mode)
    counts = [(len(one[1]) + len(two[1])) // 4, len(three[1]) // 4]
    values, grids = batch([[one, two], [three]], room=70)
    clean = gradients(built, (values, grids), counts)
    dirty = torch.randint(0, 256, values.shape, dtype=torch.uint8)
    for row, count in enumerate(counts):
        dirty[row, : 4 * count] = values[row, : 4 * count]
    assert not dirty.equal(values)
    for name, gradient in gradients(built, (dirty, F.pad(grids, (0, 0, 0, 2))), counts).items():
        assert clean[name].abs().max() > 0, name
        torch.testing.assert_close(gradient, clean[name], rtol=1e-12, atol=1e-12, msg=name)


@each_mode
@pytest.mark.parametrize("shape", [(2, 0, 0), (2, 7, 0), (2, 7, 3)])
def test_rows_without_items_give_gradients_of_zero(mode: str, shape: tuple[int, int, int]) -> None:
    built = encoder(mode)
    rows, patches, slots = shape
    out = built(torch.zeros(rows, patches, 48, dtype=torch.uint8), torch.zeros(rows, slots, 3, dtype=torch.int64))
    assert out.shape[0] == rows
    assert out.isfinite().all()
    (out * 0).sum().backward()
    for name, p in built.named_parameters():
        assert p.grad is not None, name
        assert (p.grad == 0).all(), name


def test_each_parameter_says_how_it_starts() -> None:
    built = encoder("class token")
    assert built.vision.layers["0"].o.initial("weight").std == pytest.approx(0.3 / 2)
    for name, _ in built.named_parameters():
        module, _, key = name.rpartition(".")
        owner: Any = built.get_submodule(module)
        kind = "zeros" if key == "bias" else "ones" if module.endswith("norm") else "normal"
        assert owner.initial(key).kind == kind, name
    assert built.units == ("vision.layers.0", "vision.layers.1")
    assert all(built.get_submodule(unit) for unit in built.units)


def test_pixels_are_normalised() -> None:
    config = Image.Config(**SMALL, mean=(0.5, 0.25, 0.0), deviation=(0.5, 0.25, 2.0))
    built: Any = Pictures(config).encoder(8)
    values = torch.tensor([0, 255, 51], dtype=torch.uint8).repeat(16)
    seen = built.vision.pixels(values, torch.float64)
    torch.testing.assert_close(seen.view(16, 3)[5], torch.tensor([-1.0, 3.0, 0.1], dtype=torch.float64))


def test_places_follow_the_order_of_patches() -> None:
    where = places(torch.tensor([[[1, 2, 4], [1, 4, 2], [0, 0, 0]]]), 20, 2)
    assert where.row[0].tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 0, 0, 0, 0]
    assert where.column[0].tolist() == [0, 1, 0, 1, 2, 3, 2, 3, 0, 1, 0, 1, 0, 1, 0, 1, 0, 0, 0, 0]
    assert where.item is not None
    assert where.item[0].tolist() == [0] * 8 + [1] * 8 + [3] * 4


def test_other_shapes_see_the_grid_interpolated() -> None:
    positions = fakes.initialised(LearnedPositions(4, 6, class_token=False, std=1.0)).double()
    table = positions.table.weight.T.reshape(1, 6, 4, 4)
    for rows, columns in ((4, 4), (2, 3), (1, 7), (8, 5)):
        row, column = (x.flatten() for x in torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))
        count = torch.full_like(row, 1)
        where = Places(row, column, count * rows, count * columns, frame=count)
        expected = F.interpolate(table, (rows, columns), mode="bilinear", align_corners=False)[0].flatten(1).T
        torch.testing.assert_close(positions(where), expected, rtol=1e-6, atol=1e-6)
    square = Places(row * 0 + 3, row * 0 + 1, row, row)
    torch.testing.assert_close(positions(square)[0], positions.table.weight[13])


def test_counts_operations() -> None:
    built = encoder("linear")
    dim, patches = 16, 32
    block = 4 * dim * dim + 2 * dim * 24
    products = 2 * patches * (48 * dim + 2 * block) + 2 * (patches // 4) * 64 * 8
    assert built.flops(patches) == products + 2 * 4 * patches * 16 * dim


@each_mode
def test_frozen_blocks_keep_nothing_for_a_backward_pass(mode: str) -> None:
    built = encoder(mode)
    built.vision.requires_grad_(False)
    kept: list[torch.Size] = []
    given = batch([items(mode)])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        features = built.vision.register_forward_hook(lambda module, args, out: kept.append(out.requires_grad))
        out = built(*given)
    features.remove()
    assert kept[0] is False, "nothing was kept before the connector"
    out.sum().backward()
    assert all(p.grad is None for p in built.vision.parameters())
    assert all(p.grad is not None for p in built.connector.parameters())
