"""A decoder whose rotations follow time, height and width of items."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import drawn
import tiny_models
from forge_train import Batch
from forge_train_kit.modalities import extras_of
from forge_train_kit.model import ITEM_POSITIONS, Slots
from forge_train_tools.hookspecs import data_stages

pytestmark = pytest.mark.unit

SECTIONS = "decoder.rope.sections=[1,2,1]"
IMAGE = tuple(f"{key}={value}" for key, value in drawn.OPTIONS.items())


@pytest.fixture(scope="module")
def made() -> Any:
    job, model = tiny_models.composed(SECTIONS, *IMAGE, plugins=("image", "drawn:Drawn"))
    return job, model.parts[0]


def batch() -> Batch:
    """Rows with 1, 0 and 2 pictures of different sizes."""
    ids = torch.randint(20, 60, (3, 24), generator=torch.Generator().manual_seed(1))
    ids[:, 0] = torch.tensor([40, 39, 41])
    return drawn.with_pictures(Batch(ids, ids.roll(-1, 1)))


def test_a_batch_is_prepared_and_gives_what_the_model_computes_itself(made: Any) -> None:
    job, model = made
    assert (
        "decoder",
        [("map", "positions of items along time, height and width (decoder.rope.sections)")],
    ) in data_stages(job)
    given = batch()
    assert given.extras["image_grids"].prod(-1).bool().sum(-1).tolist() == [1, 0, 2]
    (prepared,) = job.hooks.prepare_batch()([given], 0)
    assert prepared.extras[ITEM_POSITIONS].shape == (3, 24, 3)
    with torch.no_grad():
        ours = model(prepared.inputs, **prepared.model_inputs())
        again = {name: one for name, one in prepared.model_inputs().items() if name != ITEM_POSITIONS}
        torch.testing.assert_close(model(prepared.inputs, **again), ours, rtol=0, atol=0)
        flat = torch.arange(24)[None, :, None].expand(3, -1, 3)
        plain = model(prepared.inputs, **{**again, ITEM_POSITIONS: flat})
    assert (plain - ours)[[0, 2]].abs().amax((1, 2)).min() > 1e-3
    assert torch.equal(plain[1], ours[1]), "the row of text"


def test_text_alone_is_that_of_plain_rotations(made: Any) -> None:
    ids = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(2))
    plain = tiny_models.composed(*IMAGE, plugins=("image", "drawn:Drawn"))[1].parts[0]
    plain.load_state_dict(made[1].state_dict())
    with torch.no_grad():
        assert torch.equal(plain(ids), made[1](ids))
        three = torch.zeros(2, 24, 3, dtype=torch.int64)  # of a batch that was prepared for another model
        assert torch.equal(plain(ids, **{ITEM_POSITIONS: three}), plain(ids))


def test_a_text_goes_on_behind_its_items(made: Any) -> None:
    """One row with a cache, and rows side by side that begin and end."""
    _, model = made
    whole = batch()
    names = extras_of("image")
    for row in range(3):
        one = whole.slice("batch", (row, row + 1))
        rest = one.inputs[:, 12:]
        first = {**one.extras, names[2]: one.extras[names[2]][:, :12]}
        with torch.inference_mode():
            expected = model(one.inputs, **one.extras)
            cache = model.new_cache(1, 24)
            parts = [model(one.inputs[:, :12], cache=cache, **first)]
            parts += [model(rest[:, at : at + 1], cache=cache) for at in range(12)]
            torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-5)

    slots = Slots(3, 32, torch.device("cpu"), joint=False)
    with torch.inference_mode():
        cache = model.new_slots(slots)
        for row in range(3):
            one = whole.slice("batch", (row, row + 1))
            slots.begin(row, 12)
            first = {**one.extras, names[2]: one.extras[names[2]][:, :12]}
            model(one.inputs[:, :12], position_ids=torch.arange(12)[None], cache=cache, **first)
        order = [0, 1, 2]
        for at in range(12, 24):
            if at == 18:
                slots.end(0, 2)
                order = [2, 1]
            slots.advance(len(order))
            ids = torch.zeros(4, 1, dtype=torch.int64)
            ids[: len(order), 0] = whole.inputs[order, at]
            found = model(ids, position_ids=torch.full((4, 1), at), cache=cache)
            expected = model(whole.inputs, **whole.extras)[order, at]
            torch.testing.assert_close(found[: len(order), 0], expected, rtol=1e-4, atol=1e-5)


def test_items_of_one_token_have_no_axes() -> None:
    job, model = tiny_models.composed(
        SECTIONS, "cross_attention.every=1", *IMAGE, plugins=("image", "drawn:Drawn", "cross_attention")
    )
    text = Batch(torch.ones(1, 8).long(), torch.ones(1, 8).long())
    assert model.parts[0].item_positions is None
    assert ITEM_POSITIONS not in job.hooks.prepare_batch()([text], 0)[0].extras
