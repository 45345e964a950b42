"""`gqa` and `sdpa` against attention written out, head by head."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import fakes
from forge_train_kit.layers import AttentionOptions, Layer
from forge_train_kit.model import RoPE
from forge_train_plugins.attention._gqa import GroupedQueryAttention
from forge_train_plugins.attention._sdpa import Kernel
from peak_memory import peak_memory

pytestmark = pytest.mark.unit


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def written_out(query: Tensor, key: Tensor, value: Tensor, document_ids: Tensor | None = None) -> Tensor:
    """Equation 1 of “Attention is all you need” for each sequence, head and query."""
    out, groups = torch.zeros_like(query), query.shape[2] // key.shape[2]
    offset = key.shape[1] - query.shape[1]
    for b, t, h in torch.cartesian_prod(*(torch.arange(n) for n in query.shape[:3])).tolist():
        seen = [s for s in range(t + offset + 1) if document_ids is None or document_ids[b, s] == document_ids[b, t]]
        logits = key[b, seen, h // groups] @ query[b, t, h] / math.sqrt(query.shape[3])
        out[b, t, h] = logits.softmax(0) @ value[b, seen, h // groups]
    return out


DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    ("queries", "document_ids"), [(6, None), (6, DOCUMENTS), (1, None), (4, None)], ids=["all", "packed", "one", "last"]
)
def test_kernel_is_attention_written_out(kv_heads: int, queries: int, document_ids: Tensor | None) -> None:
    query = random(2, queries, 4, 8)
    key, value = random(2, 6, kv_heads, 8, seed=1), random(2, 6, kv_heads, 8, seed=2)
    found = Kernel()(query, key, value, AttentionOptions(document_ids=document_ids))
    torch.testing.assert_close(found, written_out(query, key, value, document_ids))


def test_kernel_takes_a_scale() -> None:
    query, key = random(1, 3, 1, 4), random(1, 3, 1, 4, seed=1)
    scaled, plain = AttentionOptions(scale=0.25), AttentionOptions()
    torch.testing.assert_close(Kernel()(query, key, key, scaled), Kernel()(query * 0.5, key, key, plain))


@pytest.mark.parametrize("document_ids", [None, torch.zeros(1, 256, dtype=torch.int64)], ids=["causal", "packed"])
def test_keys_and_values_are_not_repeated_for_their_groups(document_ids: Tensor | None) -> None:
    """Sixteen query heads share one key head: repeated, keys and values would take twice the query's memory."""
    query, key = random(1, 256, 16, 64).float().requires_grad_(), random(1, 256, 1, 64).float().requires_grad_()
    masks = 0 if document_ids is None else 256 * 256 * (4 + 4 * 1)
    size = query.numel() * 4
    assert (
        peak_memory(lambda: Kernel()(query, key, key, AttentionOptions(document_ids=document_ids)))
        <= 1.5 * size + masks
    )


def test_layers_share_the_mask_of_a_batch() -> None:
    query, kernel, one_mask = random(1, 256, 1, 8).float().requires_grad_(), Kernel(), 256 * 256 * 4
    options = AttentionOptions(document_ids=torch.zeros(1, 256, dtype=torch.int64))
    assert peak_memory(lambda: [kernel(query, query, query, options) for _ in range(8)]) <= 3 * one_mask


def test_a_mask_is_made_anew_when_the_documents_change_in_place() -> None:
    kernel, query = Kernel(), random(2, 6, 1, 4)
    document_ids = torch.zeros_like(DOCUMENTS)
    options = AttentionOptions(document_ids=document_ids)
    kernel(query, query, query, options)
    document_ids.copy_(DOCUMENTS)
    torch.testing.assert_close(kernel(query, query, query, options), written_out(query, query, query, DOCUMENTS))


def layer(**values: object) -> Layer:
    shape = {"index": 0, "num_layers": 1, "dim": 12, "heads": 4, "kv_heads": 2, "head_dim": 6, "ffn_dim": 16}
    return Layer(**(shape | values))  # type: ignore[arg-type]


def attention(**values: object) -> GroupedQueryAttention:
    job = fakes.job()
    made = job.hooks.gqa.attention(layer(**values), job)
    return fakes.initialised(made).double()  # type: ignore[no-any-return]


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_module_is_projections_norms_rotation_and_kernel(qk_norm: bool, bias: bool) -> None:
    rope = RoPE(6, length=8)
    module, x = attention(qk_norm=qk_norm, bias=bias, qkv_bias=bias, rope=rope), random(2, 5, 12)

    def heads(projection: nn.Linear, norm: nn.Module | None) -> Tensor:
        split: Tensor = projection(x).reshape(2, 5, -1, 6)
        return split if norm is None else norm(split)

    query, key = (rope(heads(p, n)) for p, n in ((module.q, module.q_norm), (module.k, module.k_norm)))
    expected = module.o(written_out(query, key, heads(module.v, None)).reshape(2, 5, 24))
    torch.testing.assert_close(module(x), expected, rtol=1e-6, atol=1e-6)


class Counted(RoPE):
    """Counts its calls."""

    calls = 0

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        self.calls += 1
        return super().forward(x, position_ids)


@pytest.mark.parametrize("grad", [True, False])
def test_queries_and_keys_of_one_token_are_rotated_together(grad: bool) -> None:
    rope = Counted(6, length=8)
    module, x = attention(rope=rope), random(3, 2, 12)
    places = torch.tensor([[2, 3], [0, 1], [6, 7]])
    cache, last = module.new_cache(3, 2), slice(1, None)
    with torch.set_grad_enabled(grad):
        module(x[:, :1], position_ids=places[:, :1], cache=cache)
        assert rope.calls == 1
        found = module(x[:, last], position_ids=places[:, last], cache=cache)
        torch.testing.assert_close(found, module(x, position_ids=places)[:, last])
        assert rope.calls == 4, "two more calls for the two tokens at once"


def test_declares_its_start_kernel_plan_and_cost() -> None:
    module = attention(qk_norm=True, output_std=0.001)
    assert isinstance(module.kernel, Kernel)
    assert module.o.initial("weight").std == 0.001
    assert module.tensor_plan().keys() == {name for name, _ in module.named_children()}
    weights = sum(p.numel() for p in module.parameters() if p.ndim == 2)
    assert module.flops_per_token(10) == 6 * weights + 6 * 10 * 4 * 6


def test_fewer_local_heads_work_as_on_a_tensor_parallel_rank() -> None:
    """What a rank with half of the heads computes is that half: shapes follow from the projections."""
    module, x = attention(), random(1, 4, 12)
    whole = module(x)
    halves = []
    for rank in range(2):
        half = attention(heads=2, kv_heads=1)
        with torch.no_grad():
            for name in "qkv":
                getattr(half, name).weight.copy_(getattr(module, name).weight.chunk(2, 0)[rank])
            half.o.weight.copy_(module.o.weight.chunk(2, 1)[rank])
        halves.append(half(x))
    torch.testing.assert_close(halves[0] + halves[1], whole)
