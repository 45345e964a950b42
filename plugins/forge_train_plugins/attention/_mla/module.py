"""The module of the `mla` plugin."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_train_kit.layers import AttentionKernel, AttentionOptions, Layer
from forge_train_kit.model import (
    AttentionDropout,
    KVCache,
    Linear,
    PositionMemory,
    RMSNorm,
    RoPE,
    Slots,
    TensorStyle,
    flops_per_token,
)


@dataclass(frozen=True)
class Sizes:
    """Feature counts of the latents and of one head."""

    q_rank: int
    """0 if queries have no latent."""
    kv_rank: int
    plain: int
    """Features of queries and keys that carry no position."""
    rotated: int
    value: int

    @property
    def head(self) -> int:
        """Features of queries and keys."""
        return self.plain + self.rotated

    @property
    def widest(self) -> int:
        """The largest feature count that a kernel is given."""
        return max(self.head, self.value)


class HeadsLinear(Linear):
    """A projection to or from heads, whose features tensor parallelism keeps together."""

    def __init__(self, in_features: int, out_features: int, head_dim: int, *, std: float, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias, std=std)
        self.head_dim = head_dim


class LatentCache(KVCache):
    """Latents and shared rotated features, `[batch, sequence, kv_rank + rope_dim]`, of all positions so far."""

    def __init__(self, batch: int, length: int) -> None:
        super().__init__(batch, length)
        self.expansion: Tensor | None = None
        """The weights that expand a latent to keys and values, `[kv_rank, heads, features]`."""


class LatentSlots(PositionMemory):
    """The same of rows that are generated side by side."""

    expansion: Tensor | None = None


class LatentAttention(nn.Module):
    """Multi-head latent attention (arXiv:2405.04434, eq. 9 to 19, and figure 3).

    The number of heads is read from the projections' outputs, so that each rank may hold some of the heads.
    """

    def __init__(
        self,
        layer: Layer,
        sizes: Sizes,
        rope: RoPE | None,
        kernel: AttentionKernel,
        *,
        scale: float,
        interleaved: bool,
        dropout: AttentionDropout | None = None,
    ) -> None:
        super().__init__()
        self.heads = self.kv_heads = layer.heads
        self.head_dim = sizes.widest
        self.sizes, self.rope, self.kernel, self.scale, self.interleaved = sizes, rope, kernel, scale, interleaved
        self.attention_dropout, self.dropout = layer.attention_dropout, dropout
        heads, dim, std, bias = layer.heads, layer.dim, layer.std, layer.qkv_bias
        self.q_a = self.q_norm = None
        if sizes.q_rank:
            self.q_a = Linear(dim, sizes.q_rank, bias=bias, std=std)
            # DeepSeek's epsilon in norms of latents, whatever the model's other norms use
            self.q_norm = RMSNorm(sizes.q_rank, 1e-6)
        self.q_b = HeadsLinear(sizes.q_rank or dim, heads * sizes.head, sizes.head, std=std)
        self.kv_a = Linear(dim, sizes.kv_rank + sizes.rotated, bias=bias, std=std)
        self.kv_norm = RMSNorm(sizes.kv_rank, 1e-6)
        each = sizes.plain + sizes.value
        self.kv_b = HeadsLinear(sizes.kv_rank, heads * each, each, std=std)
        self.o = HeadsLinear(heads * sizes.value, dim, sizes.value, bias=layer.o_bias, std=layer.output_std)
        self.weights = sum(one.weight.numel() for one in self.modules() if isinstance(one, nn.Linear))

    def forward(
        self,
        x: Tensor,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: LatentCache | LatentSlots | None = None,
    ) -> Tensor:
        """`[batch, sequence, dim]` → the same; `position_ids`, `document_ids`: `[batch, sequence]` int64 or None.

        Raises:
            ValueError: for document ids with a cache that already holds tokens.
        """
        sizes = self.sizes
        q_BTHD = self._query(x, position_ids)
        latent_BTR, k_rotated_BTP = torch.split(self.kv_a(x), [sizes.kv_rank, sizes.rotated], -1)
        latent_BTR = self.kv_norm(latent_BTR)
        k_rotated_BTP = self._rotate(k_rotated_BTP[:, :, None], position_ids)[:, :, 0]
        if cache is None:
            return self._plain(q_BTHD, latent_BTR, k_rotated_BTP, document_ids)
        both = torch.cat((latent_BTR, k_rotated_BTP), -1)
        if isinstance(cache, LatentSlots):
            if (found := cache.add(both)) is None:
                return self._plain(q_BTHD, latent_BTR, k_rotated_BTP, document_ids)
            ((seen_BSL,), lengths) = found
            beyond = torch.arange(seen_BSL.shape[1], device=x.device) < lengths[:, None]
            return self._absorbed(q_BTHD, seen_BSL, cache, beyond[:, None, None])
        earlier = cache.length
        seen_BSL, _ = cache.append(both, both[..., :0])
        if not earlier:
            return self._plain(q_BTHD, latent_BTR, k_rotated_BTP, document_ids)
        if document_ids is not None:
            raise ValueError("A cache does not store document ids; pass document_ids only with an empty cache.")
        queries, keys, seen = x.shape[1], seen_BSL.shape[1], None
        if queries > 1:
            seen = torch.ones(queries, keys, dtype=torch.bool, device=x.device).tril(keys - queries)
        return self._absorbed(q_BTHD, seen_BSL, cache, seen)

    def new_cache(self, batch: int, length: int) -> LatentCache:
        return LatentCache(batch, length)

    def new_slots(self, slots: Slots) -> LatentSlots:
        return LatentSlots(slots)

    def flops_per_token(self, sequence: int) -> int:
        width = self.heads * (self.sizes.head + self.sizes.value) // 2  # the logits cost one, the sums the other
        return flops_per_token(sequence, weights=self.weights, width=width)

    def tensor_plan(self) -> dict[str, TensorStyle]:
        """Every rank computes the latents of all tokens, and its own heads from them, so the gradients of the weights
        that make latents are summed over the ranks."""
        plan: dict[str, TensorStyle] = {"q_b": "colwise", "kv_a": "heads", "kv_norm": "heads", "kv_b": "colwise"}
        if self.q_a is not None:
            plan |= {"q_a": "heads", "q_norm": "heads"}
        if self.dropout is not None:
            plan["dropout"] = "heads"
        return plan | {"o": "rowwise"}

    def _query(self, x: Tensor, position_ids: Tensor | None) -> Tensor:
        if self.q_a is not None and self.q_norm is not None:
            x = self.q_norm(self.q_a(x))
        q_BTHD = torch.unflatten(self.q_b(x), -1, (-1, self.sizes.head))
        plain, rotated = torch.split(q_BTHD, [self.sizes.plain, self.sizes.rotated], -1)
        return torch.cat((plain, self._rotate(rotated, position_ids)), -1)

    def _rotate(self, x_BTHP: Tensor, position_ids: Tensor | None) -> Tensor:
        if self.interleaved:
            x_BTHP = torch.unflatten(x_BTHP, -1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return x_BTHP if self.rope is None else self.rope(x_BTHP, position_ids)

    def _plain(self, q_BTHD: Tensor, latent_BTR: Tensor, k_rotated_BTP: Tensor, document_ids: Tensor | None) -> Tensor:
        """Attention with a key and a value for each head."""
        sizes = self.sizes
        kv_BTHE = torch.unflatten(self.kv_b(latent_BTR), -1, (-1, sizes.plain + sizes.value))
        k_plain, v_BTHV = torch.split(kv_BTHE, [sizes.plain, sizes.value], -1)
        k_BTHD = torch.cat((k_plain, k_rotated_BTP[:, :, None].expand(-1, -1, k_plain.shape[2], -1)), -1)
        query, key, value = (F.pad(x, (0, sizes.widest - x.shape[-1])) for x in (q_BTHD, k_BTHD, v_BTHV))
        dropped = None if self.dropout is None else self.dropout(latent_BTR)
        options = AttentionOptions(scale=self.scale, document_ids=document_ids, dropout=dropped)
        out_BTHV = self.kernel(query, key, value, options)[..., : sizes.value]
        mixed: Tensor = self.o(out_BTHV.flatten(2))
        return mixed

    def _absorbed(
        self, q_BTHD: Tensor, seen_BSL: Tensor, cache: LatentCache | LatentSlots, seen: Tensor | None
    ) -> Tensor:
        """Attention on latents, which all heads share: the weights that make keys are applied to queries, and those
        that make values to the result (arXiv:2405.04434, §2.1.2). The kernel is not used: few accept heads as wide as a
        latent."""
        sizes = self.sizes
        if cache.expansion is None:
            # Through the module, because a plugin may have replaced it, with an adapter for example.
            unit = torch.eye(sizes.kv_rank, dtype=q_BTHD.dtype, device=q_BTHD.device)
            cache.expansion = torch.unflatten(self.kv_b(unit), -1, (-1, sizes.plain + sizes.value))
        to_key_RHD, to_value_RHV = torch.split(cache.expansion, [sizes.plain, sizes.value], -1)
        plain, rotated = torch.split(q_BTHD, [sizes.plain, sizes.rotated], -1)
        query_BHTL = torch.cat((torch.einsum("bthd,rhd->bhtr", plain, to_key_RHD), rotated.transpose(1, 2)), -1)
        shared = seen_BSL[:, None]
        found_BHTL = F.scaled_dot_product_attention(
            query_BHTL[: len(shared)], shared, shared, attn_mask=seen, scale=self.scale, enable_gqa=True
        )
        if isinstance(cache, LatentSlots):
            found_BHTL = cache.slots.outward(found_BHTL)
        out_BTHV = torch.einsum("bhtr,rhv->bthv", found_BHTL[..., : sizes.kv_rank], to_value_RHV)
        mixed: Tensor = self.o(out_BTHV.flatten(2))
        return mixed
