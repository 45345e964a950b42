"""The encoder of images: rows, items and padding never see each other."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import fakes
from forge_train_kit.model.rope import rotated
from forge_train_plugins.modalities._vision.encoder import VisionEncoder
from forge_train_plugins.modalities._vision.modality import Clips, Pictures
from forge_train_plugins.modalities._vision.places import Places, places
from forge_train_plugins.modalities._vision.positions import LearnedPositions, Rotary, Sines
from forge_train_plugins.modalities.vision import Image, Video

pytestmark = pytest.mark.unit

SMALL = {"size": 16, "patch": 4, "merge": 2, "dim": 16, "layers": 2, "heads": 2, "hidden": 24, "std": 0.3}
MODES: dict[str, dict[str, Any]] = {
    "square": {},
    "keep": {"fit": "keep"},
    "class token": {"class_token": True, "first_norm": True, "patch_bias": False, "activation": "quick_gelu"},
    "pooling, keep, sines": {"fit": "keep", "connector": "pooling", "positions": "sines"},
    "pooling, rotary": {"connector": "pooling", "positions": "rotary"},
    "resampler": {"connector": "resampler", "queries": 3, "merge": 1},
    "resampler, keep, rotary": {
        "fit": "keep",
        "positions": "rotary",
        "connector": "resampler",
        "queries": 3,
        "merge": 1,
    },
    "video": {"temporal": 2},
    "video, keep, rotary": {"temporal": 2, "fit": "keep", "positions": "rotary"},
    "video, pooling": {"temporal": 2, "connector": "pooling"},
    "video, resampler": {"temporal": 2, "connector": "resampler", "queries": 3, "merge": 1},
    "sines_1d": {"fit": "keep", "positions": "sines_1d"},
    "windows, rms, gated, keep": {
        "fit": "keep",
        "positions": "rotary",
        "window": 2,
        "full_layers": (1,),
        "norm": "rms",
        "gated": True,
        "activation": "silu",
        "patch_frames": 2,
        "patch_bias": False,
        "connector_hidden": 20,
    },
    "windows": {"window": 2},
    "norms after, gated connector": {"norm_place": "after", "connector": "gated", "connector_hidden": 20},
    "linear": {"connector": "linear", "final_norm": False, "bias": False},
}
each_mode = pytest.mark.parametrize("mode", MODES)


def modality(mode: str) -> Clips | Pictures:
    options = {**SMALL, **MODES[mode]}
    return Clips(Video.Config(**options)) if "temporal" in options else Pictures(Image.Config(**options))


def encoder(mode: str) -> VisionEncoder:
    """An encoder in fp64, of width 8, built without memory as models are."""
    with torch.device("meta"):
        built: Any = modality(mode).encoder(8)
    for module in built.to_empty(device="cpu").modules():
        if hasattr(module, "reset_buffers"):
            module.reset_buffers()
    return fakes.initialised(built).double()


def items(mode: str) -> list[tuple[tuple[int, int, int], Tensor]]:
    """Three images or clips, as grid and patches."""
    torch.manual_seed(1)
    frames = [2, 4, 2] if "temporal" in MODES[mode] else [1, 1, 1]
    grids = [(1, 4, 2), (1, 2, 2), (1, 2, 6)] if MODES[mode].get("fit") == "keep" else [(1, 4, 4)] * 3
    grids = [(count, *grid[1:]) for count, grid in zip(frames, grids, strict=True)]
    return [(grid, torch.randint(0, 256, (math.prod(grid), 48), dtype=torch.uint8)) for grid in grids]


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
    counts = [modality(mode).positions(grid) for grid, _ in (one, two, three)]
    assert [len(features) for features in alone] == counts
    packed = built(*batch([[two, one], [three]], room=120))
    torch.testing.assert_close(packed[0, : counts[1] + counts[0]], torch.cat((alone[1], alone[0])))
    torch.testing.assert_close(packed[1, : counts[2]], alone[2])


@pytest.mark.parametrize("options", [{}, {"temporal": 2}, {"positions": "rotary"}, {"window": 2}], ids=str)
def test_squares_side_by_side_are_as_in_rows_of_their_own(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODES, "rows", options)
    monkeypatch.setitem(MODES, "masked", {**options, "fit": "keep"})
    (built, masked), frames = (encoder(mode) for mode in ("rows", "masked")), 2 * options.get("temporal", 1)
    torch.manual_seed(4)
    values = torch.randint(0, 256, (2, 2 * frames * 16, 48), dtype=torch.uint8)
    grids = torch.tensor([[[frames, 4, 4], [frames, 4, 4]]] * 2)
    torch.testing.assert_close(masked(values, grids), built(values, grids))


def test_a_window_sees_what_an_image_of_its_size_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"fit": "keep", "positions": "sines", "window": 2, "final_norm": False, "layers": 2}
    monkeypatch.setitem(MODES, "window", options)
    built = encoder("window").vision
    torch.manual_seed(3)
    grid, values = torch.tensor([[[1, 4, 6]]]), torch.randint(0, 256, (1, 24, 48), dtype=torch.uint8)
    whole = places(grid, 24, 2)
    together = built(values, whole)
    for block in range(6):  # blocks of merge × merge patches are the windows
        some = slice(4 * block, 4 * block + 4)
        parts = {name: getattr(whole, name)[:, some] for name in ("row", "column", "rows", "columns", "item", "time")}
        torch.testing.assert_close(built(values[:, some], Places(**parts, items=1, frame=None)), together[:, some])
    monkeypatch.setitem(MODES, "window", {**options, "full_layers": (0,)})
    again = encoder("window").vision
    again.load_state_dict(built.state_dict())
    assert (again(values, whole) - together).abs().amax(-1).min() > 1e-3


@each_mode
def test_padding_changes_no_feature_and_no_gradient(mode: str) -> None:
    built, (one, two, three) = encoder(mode), items(mode)
    counts = [sum(modality(mode).positions(grid) for grid, _ in row) for row in ((one, two), (three,))]
    values, grids = batch([[one, two], [three]], room=110)
    clean = gradients(built, (values, grids), counts)
    dirty = torch.randint(0, 256, values.shape, dtype=torch.uint8)
    for row, count in enumerate(grids.prod(-1).sum(-1).tolist()):
        dirty[row, :count] = values[row, :count]
    assert not dirty.equal(values)
    for name, gradient in gradients(built, (dirty, F.pad(grids, (0, 0, 0, 2))), counts).items():
        assert clean[name].abs().max() > 0 or name.endswith("k.bias"), name  # softmax does not see it
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


def test_norms_after_attention_and_feed_forward_and_a_gated_connector() -> None:
    """As CogVLM's own code computes them (THUDM/cogvlm-chat-hf, visual.py)."""
    built = encoder("norms after, gated connector")
    block, connector = built.vision.layers["0"], built.connector
    x = torch.randn(1, 16, 16, dtype=torch.float64)
    q, k, v = (one(x).unflatten(-1, (2, 8)).transpose(1, 2) for one in (block.q, block.k, block.v))
    mixed = ((q @ k.mT / 8**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
    h = x + block.attention_norm(block.o(mixed))
    fed = block.down(F.gelu(block.up(h), approximate="tanh"))
    torch.testing.assert_close(block(x, None, None), h + block.feed_forward_norm(fed))
    h = F.gelu(F.layer_norm(connector.first(x.view(1, 4, 64)), (8,), connector.norm.weight, connector.norm.bias))
    torch.testing.assert_close(connector(x, None), connector.down(F.silu(connector.gate(h)) * connector.up(h)))
    assert connector.up.out_features == 20
    assert not any(name.endswith("bias") for name, _ in connector.named_parameters() if "norm" not in name)


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


def grid(rows: int, columns: int, *, frame: bool) -> Places:
    """The places of one frame, in reading order."""
    row, column = (x.flatten() for x in torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))
    one = torch.ones_like(row)
    return Places(row, column, one * rows, one * columns, one, one, 1, one if frame else None)


def test_other_shapes_see_the_grid_interpolated() -> None:
    positions = fakes.initialised(LearnedPositions(4, 6, class_token=False, std=1.0)).double()
    table = positions.table.weight.T.reshape(1, 6, 4, 4)
    for rows, columns in ((4, 4), (2, 3), (1, 7), (8, 5)):
        expected = F.interpolate(table, (rows, columns), mode="bilinear", align_corners=False)[0].flatten(1).T
        torch.testing.assert_close(positions(grid(rows, columns, frame=True)), expected, rtol=1e-6, atol=1e-6)
    assert positions(grid(4, 4, frame=False)).equal(positions.table.weight)


def test_sines_tell_row_and_column_or_the_number() -> None:
    two, one = Sines(8, axes=2)(grid(3, 5, frame=True)), Sines(8, axes=1)(grid(3, 5, frame=True))
    row, column = two.view(3, 5, 2, 4).unbind(2)
    assert (row == row[:, :1]).all()
    assert (column == column[:1]).all()
    angles = torch.tensor([[2.0, 0.02], [3.0, 0.03]])
    expected = torch.cat((angles.sin(), angles.cos()), -1)
    torch.testing.assert_close(torch.stack((row[2, 3], column[2, 3])), expected)
    angles = 13.0 * torch.tensor([1.0, 0.1, 0.01, 0.001])
    torch.testing.assert_close(one[13], torch.cat((angles.sin(), angles.cos())))


def test_places_and_rotation_are_those_of_qwen2_vl() -> None:
    transformers = pytest.importorskip("transformers")
    module = pytest.importorskip("transformers.models.qwen2_vl.modeling_qwen2_vl")
    grids = torch.tensor([[1, 4, 6], [1, 2, 2]])
    where = places(grids[None], 28, 2)
    ids = module.get_vision_position_ids(grids, 2)
    assert torch.stack((where.row[0], where.column[0]), -1).equal(ids.view(28, 2).long())
    config = transformers.Qwen2VLConfig(vision_config={"embed_dim": 16, "num_heads": 2}).vision_config
    cos, sin = module.Qwen2VLVisionRotaryEmbedding(config)(torch.zeros(1), ids)
    q = torch.randn(28, 2, 8)
    expected, _ = module.apply_rotary_pos_emb_vision(q, q, cos, sin)
    torch.testing.assert_close(rotated(q[None], *Rotary(8)(where))[0], expected)


def test_rotation_sees_only_distances() -> None:
    q, k = torch.randn(2, 1, 1, 1, 8)
    q, k = (rotated(one, *Rotary(8)(grid(3, 5, frame=True)))[0, :, 0] for one in (q, k))
    torch.testing.assert_close(q[0] @ k[6], q[8] @ k[14])


@pytest.mark.parametrize("positions", ["learned", "sines", "sines_1d", "rotary"])
def test_features_depend_on_the_place_of_their_patch(positions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODES, "placed", {"positions": positions})
    values = torch.randint(0, 256, (1, 16, 48), dtype=torch.uint8)
    moved = torch.cat((values[:, 4:8], values[:, :4], values[:, 8:]), 1)
    one, other = (encoder("placed")(given, torch.tensor([[[1, 4, 4]]])) for given in (values, moved))
    assert (one[0, 0] - other[0, 1]).abs().max() > 1e-6
    assert (one[0, 3] - other[0, 3]).abs().max() > 1e-6


def test_pooling_sees_a_block_as_a_set() -> None:
    built = encoder("pooling, rotary")
    features = torch.randn(1, 8, 16, dtype=torch.float64)
    shuffled = features[:, [2, 0, 3, 1, 4, 5, 6, 7]]
    torch.testing.assert_close(built.connector(features, None), built.connector(shuffled, None))


@pytest.mark.parametrize("mode", ["pooling, rotary", "resampler"])
def test_vectors_depend_on_all_that_they_may_see(mode: str) -> None:
    built = encoder(mode)
    features = torch.randn(1, 16, 16, dtype=torch.float64, requires_grad=True)
    out = built.connector(features, lambda: places(torch.tensor([[[1, 4, 4]]]), 16, 1))
    (seen,) = torch.autograd.grad(out[0, 1].sum(), features)
    whole = range(16) if mode == "resampler" else range(4, 8)
    assert [at for at in range(16) if seen[0, at].abs().max() > 0] == [*whole]


def test_counts_operations() -> None:
    built = encoder("linear")
    dim, patches = 16, 32
    block = 4 * dim * dim + 2 * dim * 24
    products = 2 * patches * (48 * dim + 2 * block) + 2 * (patches // 4) * 64 * 8
    assert built.flops(patches) == products + 2 * 4 * patches * 16 * dim


@each_mode
def test_counts_the_operations_that_torch_counts(mode: str) -> None:
    built = encoder(mode).float()
    grid = (built.temporal, 4, 4)
    with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        built(torch.zeros(1, math.prod(grid), 48, dtype=torch.uint8), torch.tensor([[grid]]))
    assert built.flops(math.prod(grid)) == counted.get_total_flops()


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("frozen", ["", "vision", "connector", "vision and connector"])
def test_a_step_has_no_backward_pass_through_what_is_frozen(
    frozen: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch counts, but for gradients that no one needs, which count where anything is trained."""
    monkeypatch.setitem(MODES, "step", {"once": kept})
    built = encoder("step").float()
    for name in filter(None, frozen.split(" and ")):
        built.get_submodule(name).requires_grad_(False)
    values, grids = torch.zeros(1, 16, 48, dtype=torch.uint8), torch.tensor([[[1, 4, 4]]])
    with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):
        out = built(values, grids)
        _ = out.sum().backward() if out.requires_grad else None
    first, second = (2 * 4 * one.weight.numel() for one in (built.connector.first, built.connector.second))
    unneeded = {
        "": 2 * 16 * built.vision.patches.weight.numel(),
        "vision": first,
        "connector": first + second + 2 * 16 * built.vision.patches.weight.numel(),
        "vision and connector": 0,
    }[frozen]
    here = built.vision.flops(16, 16) if kept and "vision" in frozen else 0  # nothing is kept yet
    assert built.step_flops(16) == counted.get_total_flops() + unneeded - here


def test_neighbouring_frames_are_averaged() -> None:
    """Two frames alike give what one gives; frames of other groups change nothing."""
    built, one = encoder("video"), encoder("square")
    one.connector.time = built.connector.time
    torch.manual_seed(3)
    frames = torch.randint(0, 256, (3, 4, 4, 48), dtype=torch.uint8)  # frame, block, patch of it
    clip = torch.cat((torch.stack((frames[0], frames[0]), 1), torch.stack((frames[1], frames[2]), 1)))
    out = built(clip.reshape(1, -1, 48), torch.tensor([[[4, 4, 4]]]))
    alone = one(frames[:1].reshape(1, -1, 48), torch.tensor([[[1, 4, 4]]]))
    torch.testing.assert_close(out[0, :4], alone[0])


@pytest.mark.parametrize(
    ("mode", "count"), [("video", 4), ("video, keep, rotary", 4), ("video, pooling", 4), ("video, resampler", 3)]
)
def test_vectors_tell_the_order_of_frames(mode: str, count: int) -> None:
    """Without the place in the sequence, which attention between sequences does not see."""
    built = encoder(mode)
    values, grids = torch.randint(0, 256, (1, 64, 48), dtype=torch.uint8), torch.tensor([[[4, 4, 4]]])
    turned = values.roll(32, 1)
    assert (built(values, grids) - built(turned, grids).roll(count, 1)).abs().max() > 1e-6
    two = torch.tensor([[[2, 4, 4], [2, 4, 4]]])  # two clips that each begin anew
    torch.testing.assert_close(built(values, two), built(turned, two).roll(count, 1))


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


@each_mode
def test_says_how_many_vectors_items_have(mode: str) -> None:
    of_items = items(mode)
    _, grids = batch([of_items, of_items[:1]])
    counted = encoder(mode).vectors(grids).tolist()
    assert counted[0] == [modality(mode).positions(grid) for grid, _ in of_items]
    assert counted[1] == [counted[0][0], 0, 0]
