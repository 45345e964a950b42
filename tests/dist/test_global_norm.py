"""The norm over gradients that lie on several meshes, and clipping by it."""

from __future__ import annotations

import pytest

from forge_train_tools.testing import Pool

pytestmark = [pytest.mark.dist]


@pytest.mark.parametrize("world", [2, 4])
def test_is_one_for_all_meshes_and_plain_tensors(ranks: Pool, world: int) -> None:
    replies = ranks.run("cases:global_norm", world)
    assert len({reply["norm"] for reply in replies}) == 1
    assert replies[0]["norm"] == pytest.approx(replies[0]["expected"], rel=1e-6)
    assert replies[0]["clipped"] == pytest.approx(1.0, rel=1e-5)
    assert max(reply["worst"] for reply in replies) < 1e-4
