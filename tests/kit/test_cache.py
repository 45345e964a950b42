"""The key-value cache."""

from __future__ import annotations

import pytest
import torch

from forge_train_kit.model import KVCache

pytestmark = pytest.mark.unit


def test_gives_everything_appended_so_far_without_new_memory() -> None:
    cache = KVCache(2, 5)
    first, second = torch.randn(2, 3, 1, 4), torch.randn(2, 2, 1, 4)
    keys, _ = cache.append(first, -first)
    assert cache.length == 3
    more, values = cache.append(second, -second)
    assert torch.equal(more, torch.cat((first, second), 1))
    assert torch.equal(values, -more)
    assert more.data_ptr() == keys.data_ptr()


@pytest.mark.parametrize("shape", [(2, 6, 1, 4), (1, 1, 1, 4)], ids=["too long", "another batch"])
def test_refuses_what_does_not_fit(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="2 sequences of at most 5 positions"):
        KVCache(2, 5).append(torch.randn(shape), torch.randn(shape))
