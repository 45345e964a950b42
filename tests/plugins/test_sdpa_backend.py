"""`sdpa.backend`: torch takes that implementation, or the run is refused in one sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from forge_train import ConfigError
from forge_train_kit.layers import AttentionOptions
from forge_train_plugins.attention import _sdpa
from forge_train_plugins.attention._eager import Kernel as Eager
from forge_train_plugins.attention._sdpa import Kernel, missing, needs_equal_heads
from forge_train_plugins.attention.sdpa import SDPA
from forge_train_tools.testing import RunForge

pytestmark = [pytest.mark.unit]


@pytest.mark.parametrize(
    ("backend", "operator"), [("flash", "_flash_attention_for_cpu"), ("math", "_attention_math"), ("auto", "_flash")]
)
def test_torch_takes_the_backend(backend: str, operator: str) -> None:
    query = torch.randn(2, 12, 4, 8)
    options = AttentionOptions(document_ids=(torch.arange(12) >= 5).long().expand(2, -1))
    with torch.profiler.profile() as recorded:
        found = Kernel(backend)(query, query, query, options)
    torch.testing.assert_close(found, Eager()(query, query, query, options))
    assert any(operator in event.name for event in recorded.events())


@pytest.mark.parametrize("backend", ["efficient", "cudnn"])
def test_what_runs_on_cuda_only_is_refused_at_start_up(backend: str, run_forge: RunForge) -> None:
    with pytest.raises(ConfigError) as error:
        run_forge([SDPA], {"sdpa.backend": backend})
    assert str(error.value) == (
        f"sdpa.backend = {backend!r}: it runs on CUDA only, and the run is on cpu; use 'auto', 'flash' or 'math'."
    )


def test_a_run_with_a_backend_ends_where_the_default_does(run_forge: RunForge) -> None:
    default, math = run_forge(), run_forge([SDPA], {"sdpa.backend": "math"})
    assert math.losses == pytest.approx(default.losses, rel=1e-5)
    assert math.finished.outcome == "done"


@pytest.mark.parametrize(
    ("backend", "precision", "masked", "says"),
    [
        ("flash", "fp32", False, "computes in bf16 or fp16 only, and train.precision is 'fp32'"),
        (
            "flash",
            "bf16",
            True,
            "takes no mask, but the run needs one for documents, windows or prefixes; use the kernel",
        ),
        ("cudnn", "bf16", True, "this torch has no cuDNN"),
        ("flash", "bf16", False, ""),
        ("efficient", "fp32", True, ""),
        ("math", "fp32", True, ""),
    ],
)
def test_what_is_missing_on_cuda(
    backend: str, precision: str, masked: bool, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    found = missing(backend, torch.device("cuda"), precision, masked=masked)
    assert says in found
    assert bool(says) == bool(found)


def test_what_only_a_call_shows_is_one_sentence_too() -> None:
    query = torch.randn(1, 8, 2, 8)
    with pytest.raises(ConfigError) as error:
        Kernel("efficient")(query, query, query, AttentionOptions(window=3))
    assert str(error.value) == (
        "sdpa.backend = 'efficient': torch can't compute torch.float32 on cpu, heads of 8 features, a mask with it."
    )


@pytest.mark.parametrize(
    ("backend", "device", "flash", "repeats"),
    [
        ("auto", "cuda", True, False),
        ("auto", "cuda", False, True),
        ("efficient", "cuda", True, True),
        ("cudnn", "cuda", False, False),
        ("math", "cuda", False, False),
        ("auto", "cpu", False, False),
    ],
)
def test_heads_are_repeated_where_no_fused_kernel_takes_groups(
    backend: str, device: str, flash: bool, repeats: bool
) -> None:
    """Torch would fall back to a matrix of queries × keys without a word (2.11, 2.13)."""
    assert needs_equal_heads(backend, torch.device(device), flash=flash) is repeats


@pytest.mark.parametrize("asked", [{}, {"window": 3}, {"offset": 2}])
def test_repeated_heads_compute_the_same(asked: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    heads: list[tuple[int, int]] = []

    def attention(query: torch.Tensor, key: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
        heads.append((query.shape[1], key.shape[1]))
        return original(query, key, *given, **options)

    original = F.scaled_dot_product_attention
    monkeypatch.setattr(_sdpa, "needs_equal_heads", lambda *_, **__: True)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(_sdpa, "after_others", lambda *given: Kernel("math")._after(*given))
    shapes = ((1, 9, 4, 8), (1, 11, 2, 8), (1, 11, 2, 8))
    given = [torch.randn(shape, requires_grad=True) for shape in shapes]
    options = AttentionOptions(**asked)
    found, wanted = (kernel(*given, options) for kernel in (Kernel(), Eager()))
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(one.square().sum(), given) for one in (found, wanted)))
    assert heads
    assert all(query == key for query, key in heads)


def test_a_single_query_is_not_for_cudnn() -> None:
    """Which refuses it, and it holds no matrix anywhere: `generate` asks token by token. Others are taken as named."""
    query, key = torch.randn(1, 1, 4, 8), torch.randn(1, 7, 2, 8)
    found, wanted = (kernel(query, key, key, AttentionOptions()) for kernel in (Kernel("cudnn"), Eager()))
    torch.testing.assert_close(found, wanted)
    with pytest.raises(ConfigError, match="torch can't compute"):
        Kernel("efficient")(query, key, key, AttentionOptions())


def test_heads_are_shared_where_the_flash_kernel_sees_a_lower_right_corner(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(_sdpa, "needs_equal_heads", lambda *_, flash: asked.append(flash))
    query, key = torch.randn(1, 3, 4, 8, dtype=torch.bfloat16), torch.randn(1, 7, 2, 8, dtype=torch.bfloat16)
    for mask in (causal_lower_right(3, 7), torch.zeros(3, 7, dtype=torch.bfloat16)):
        Kernel()._compute(query, key, key, mask, None)
    assert asked == [True, False]


def test_the_flash_kernel_is_asked_as_torch_asks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """For queries after other tokens: `is_causal` would mean the upper left corner, and is always refused."""
    asked: list[bool] = []
    monkeypatch.setattr(_sdpa, "can_use_flash_attention", lambda parameters: asked.append(parameters.is_causal))
    query, key = torch.randn(1, 3, 4, 8), torch.randn(1, 7, 2, 8)
    _sdpa._flash(query, key, key)
    assert asked == [False]
