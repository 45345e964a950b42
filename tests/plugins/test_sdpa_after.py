"""`sdpa` for queries that come after other tokens, as under `cp.method = "gather"`: exact, and without a mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from forge_train_kit.layers import AttentionOptions
from forge_train_plugins.attention import _sdpa
from forge_train_plugins.attention._eager import Kernel as Eager
from forge_train_plugins.attention._sdpa import PIECE, Kernel
from forge_train_tools.planning.ledger import Ledger

pytestmark = [pytest.mark.unit]


def drawn(queries: int, keys: int, heads: int = 4, kv_heads: int = 2, features: int = 8, **like: Any) -> list[Tensor]:
    sizes = ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    return [torch.randn(2, length, many, features, **like, requires_grad=True) for length, many in sizes]


def with_gradients(kernel: Any, given: list[Tensor], **asked: Any) -> list[Tensor]:
    out = kernel(*given, AttentionOptions(**asked))
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad((out * weights).sum(), given)]


@pytest.mark.parametrize("backend", ["auto", "flash", "math"])
@pytest.mark.parametrize("queries", [2, PIECE, 2 * PIECE + 44])
def test_is_exact(backend: str, queries: int) -> None:
    """In one call for the tokens before and one for the queries' own, or in pieces with a mask that they share."""
    torch.manual_seed(0)
    given = drawn(queries, queries + 90, dtype=torch.float64)
    for asked in ({}, {"offset": 37, "scale": 0.5}):
        found, wanted = (with_gradients(kernel, given, **asked) for kernel in (Kernel(backend), Eager()))
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_a_gradient_that_is_one_number_everywhere() -> None:
    """Its memory is not laid out as the kernel reads it."""
    torch.manual_seed(0)
    given = drawn(5, 12)
    found, wanted = (
        torch.autograd.grad(kernel(*given, AttentionOptions()).sum(), given) for kernel in (Kernel(), Eager())
    )
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("backend", ["auto", "flash"])
def test_holds_nothing_as_large_as_a_mask(backend: str) -> None:
    queries, keys = 768, 2048
    given = drawn(queries, keys, heads=1, kv_heads=1)
    with Ledger() as ledger:
        own = ledger.numbers(given)
        with_gradients(Kernel(backend), given)
    assert ledger.peak(but=own) < queries * keys * 4 / 4


def test_a_mask_of_documents_is_made_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = (torch.arange(512) // 100).expand(2, -1)
    seen = _sdpa._Seen(512, 512, 0, 30, torch.float32, ids.device)
    whole = _sdpa.make_mask(seen, ids)
    monkeypatch.setattr(_sdpa, "ROWS", 60)
    with Ledger() as ledger:
        mask = _sdpa.make_mask(seen, ids)
    assert torch.equal(mask, whole)
    assert ledger.peak() < 1.3 * mask.nbytes


def test_pieces_share_a_mask() -> None:
    """The masks of all pieces would be as large as one for all queries."""
    kernel = Kernel("math")
    with torch.no_grad():
        kernel(*drawn(4 * PIECE, 5 * PIECE), AttentionOptions())
    (made,) = kernel._mask._made.values()
    assert made[0].shape == (PIECE, 5 * PIECE)
