"""Positions of items along three axes, against transformers, and what rotates by them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as theirs

from forge_train import Batch, PluginError
from forge_train_kit.modalities import Grid
from forge_train_kit.model import ITEM_POSITIONS, ItemPositions, RoPE, SectionedRoPE, Shift, Slots, SlotShift

pytestmark = pytest.mark.unit


class Tiles:
    """A modality whose blocks of two by two patches become one vector."""

    def positions(self, grid: Grid) -> int:
        return grid[0] * grid[1] * grid[2] // 4

    def spread(self, grid: Grid) -> Grid:
        return grid[0], grid[1] // 2, grid[2] // 2


TILE: Any = Tiles()


class Tones(Tiles):
    """Vectors that count like tokens."""

    def spread(self, grid: Grid) -> Any:
        return None


def row(*pieces: int | Grid, length: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    """Places, grids and kinds (1 in items) of text of so many tokens, and of items."""
    places, grids, vectors = [], [], 0
    for one in pieces:
        if isinstance(one, int):
            places += [-1] * one
        else:
            grids.append(one)
            count = Tiles().positions(one)
            places += range(vectors, vectors + count)
            vectors += count
    places += [-1] * (length - len(places))
    return torch.tensor([places]), torch.tensor([grids or [(0, 0, 0)]]), (torch.tensor([places]) >= 0).int()


def positions(places: Tensor, grids: Tensor, *ids: Tensor, of: Any = None) -> tuple[Tensor, Tensor]:
    found = ItemPositions({"tile": of or TILE})({"tile_places": places, "tile_grids": grids}, *(ids or (None,)))
    assert found is not None
    return found


def expected(places: Tensor, grids: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=1)
    model: Any = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    model.get_vision_position_ids = lambda *a, **k: theirs.Qwen2_5_VLModel.get_vision_position_ids(model, *a, **k)
    found, delta = theirs.Qwen2_5_VLModel.get_rope_index(model, places, kinds, image_grid_thw=grids[0])
    return found.permute(1, 2, 0), delta


@pytest.mark.parametrize(
    "pieces",
    [(3, (1, 4, 6), 2), ((1, 2, 2), 4), (1, (1, 2, 8), 1, (1, 8, 2), 3, (1, 6, 4)), (5,)],
    ids=["one", "at the beginning", "several", "none"],
)
def test_positions_are_those_of_transformers(pieces: tuple[Any, ...]) -> None:
    places, grids, kinds = row(*pieces)
    ours, shift = positions(places, grids)
    wanted, delta = expected(places, grids, kinds)
    assert torch.equal(ours, wanted)
    assert torch.equal(shift, delta)


def test_neighbouring_items_and_frames_are_told_apart() -> None:
    places, grids, _ = row(1, (1, 2, 4), (3, 2, 2), length=8)
    ours, shift = positions(places, grids)
    assert ours[0].tolist() == [[0, 0, 0], [1, 1, 1], [1, 1, 2], [3, 3, 3], [4, 3, 3], [5, 3, 3], [6] * 3, [7] * 3]
    assert shift.tolist() == [[0]]


def test_each_document_of_a_row_has_the_positions_that_it_has_alone() -> None:
    one, other = row(2, (1, 4, 6), 1, length=9), row((1, 2, 8), 3, (1, 4, 4), length=12)
    places = torch.cat([one[0], torch.where(other[0] >= 0, other[0] + 6, -1)], 1)
    grids, ids = torch.cat([one[1], other[1]], 1), torch.cat([torch.arange(9), torch.arange(12)])[None]
    apart = torch.cat([positions(*some[:2])[0] for some in (one, other)], 1)
    documents = torch.tensor([[0] * 9 + [1] * 12])
    for given in ((ids,), (ids, documents)):
        assert torch.equal(positions(places, grids, *given)[0], apart)


def test_text_alone_and_items_without_axes_keep_their_positions() -> None:
    ids = torch.tensor([[5, 6, 7, 0, 1, 2, 3, 4]])
    places, grids, _ = row(2, (1, 4, 4), length=8)
    for found in (positions(torch.full_like(ids, -1), grids, ids), positions(places, grids, ids, of=Tones())):
        assert torch.equal(found[0], ids[..., None].expand(-1, -1, 3))
        assert not found[1].any()
    empty = ItemPositions({"tile": TILE})({"tile_places": -torch.ones_like(ids), "tile_grids": grids[:, :0]}, ids)
    assert empty is not None
    assert torch.equal(empty[0], found[0])
    assert ItemPositions({"tile": TILE})({}, ids) is None
    assert ItemPositions({"tile": object()})({"tile_places": places, "tile_grids": grids}, ids) is None  # type: ignore[dict-item]


def test_a_batch_is_given_them_and_they_are_cut_with_it() -> None:
    places, grids, _ = row(2, (1, 4, 6), 1, length=8)
    batch = Batch(places, places, extras={"tile_places": places, "tile_grids": grids})
    made = ItemPositions({"tile": TILE}).prepared(batch)
    wanted, _ = positions(places, grids)
    assert torch.equal(made.slice("sequence", (0, 2), (6, 8)).extras[ITEM_POSITIONS], wanted[:, [0, 1, 6, 7]])
    assert ItemPositions({"tile": TILE}).prepared(Batch(places, places)).extras == {}


def test_slices_of_rows_need_prepared_positions() -> None:
    places, grids, _ = row(2, (1, 4, 6))
    with pytest.raises(PluginError, match="depend on whole rows, and this rank has slices of them"):
        ItemPositions({"tile": TILE}, sliced=True)({"tile_places": places, "tile_grids": grids}, None)


def test_a_spread_that_does_not_fit_is_refused() -> None:
    wrong: Any = type("Wrong", (Tiles,), {"spread": lambda self, grid: grid})()
    places, grids, _ = row(2, (1, 4, 6))
    with pytest.raises(PluginError, match=r"'tile': an item with the grid \(1, 4, 6\) takes 6 positions, and spread"):
        positions(places, grids, of=wrong)


@pytest.mark.parametrize("learns", [True, False])
def test_pairs_are_rotated_by_their_axis_as_in_transformers(learns: bool) -> None:
    places, grids, _ = row(3, (1, 4, 6), 2, (1, 8, 4))
    ids, _ = positions(places, grids)
    config: Any = SimpleNamespace(
        max_position_embeddings=32,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 3, 2]},
        hidden_size=24,
        num_attention_heads=2,
        head_dim=None,
    )
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 24, 12, generator=draw) for heads in (4, 2))
    rotation = theirs.Qwen2_5_VLRotaryEmbedding(config)
    turned = theirs.apply_rotary_pos_emb(q, k, *rotation(q, ids.permute(2, 0, 1)))
    with torch.set_grad_enabled(learns):
        rope = SectionedRoPE(12, (1, 3, 2), length=32, theta=100.0)
        for one, wanted in zip((q, k), turned, strict=True):
            torch.testing.assert_close(rope(one.transpose(1, 2), ids).transpose(1, 2), wanted, rtol=1e-6, atol=1e-6)
            three = torch.arange(24)[None, :, None].expand(-1, -1, 3)
            plain = RoPE(12, length=32, theta=100.0)(one.transpose(1, 2), torch.arange(24)[None])
            assert torch.equal(rope(one.transpose(1, 2), three), plain)
            assert torch.equal(rope(one.transpose(1, 2), torch.arange(24)[None]), plain)


def test_shifts_follow_their_rows() -> None:
    slots = Slots(3, 16, torch.device("cpu"), joint=True)
    kept, alone = SlotShift(slots), Shift()
    assert (kept.get(), alone.get()) == (0, 0)
    for at, value in enumerate((-3, 0, -5)):
        slots.begin(at, 4)
        assert kept.get() == 0
        kept.put(torch.tensor([[value]]))
    slots.advance(3)
    assert torch.as_tensor(kept.get())[:3].tolist() == [[-3], [0], [-5]]
    slots.end(0, 2)
    slots.advance(2)
    assert torch.as_tensor(kept.get())[:3].tolist() == [[-5], [0], [0]]


@pytest.mark.parametrize("pace", [2.0, 0.5, 2.06, 1.0])
def test_time_goes_at_the_pace_of_an_item(pace: float) -> None:
    """Where the longest side of a clip is none of time, transformers has the text after it at the same positions."""
    places, grids, kinds = row(2, (4, 2, 20), 1, (3, 2, 18), 1, length=80)
    paces = torch.tensor([[pace, 1.0]])
    given = {"tile_places": places, "tile_grids": grids, "tile_paces": paces}
    found = ItemPositions({"tile": TILE})(given, None)
    assert found is not None
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=1)
    model: Any = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    model.get_vision_position_ids = lambda *a, **k: theirs.Qwen2_5_VLModel.get_vision_position_ids(model, *a, **k)
    wanted, delta = theirs.Qwen2_5_VLModel.get_rope_index(
        model, places, 2 * kinds, video_grid_thw=grids[0], second_per_grid_ts=paces[0]
    )
    assert torch.equal(found[0], wanted.permute(1, 2, 0))
    assert torch.equal(found[1], delta)


def test_text_follows_the_last_moment_of_a_clip() -> None:
    """As in the paper, and in Qwen's own code."""
    places, grids, _ = row(2, (4, 2, 4), 3, length=13)
    given = {"tile_places": places, "tile_grids": grids, "tile_paces": torch.tensor([[2.5]])}
    found = ItemPositions({"tile": TILE})(given, None)
    assert found is not None
    assert found[0][0, 2:10, 0].tolist() == [2, 2, 4, 4, 7, 7, 9, 9]
    assert found[0][0, 10:].tolist() == [[10] * 3, [11] * 3, [12] * 3]
    assert found[1].tolist() == [[0]]
