"""A decoder-only transformer that declares what other techniques need to know about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from forge_train.base.format import format_list
from forge_train_kit.layers import Attention, FeedForward
from forge_train_kit.model import ItemPositions, Slots, TensorStyle, flops_per_token

from .fused import beside, features, layer_positions, row_positions, with_cache
from .prefix import for_layers
from .renewed import RenewedCaches, new_caches, renewed, slots_of


class Block(nn.Module):
    """One layer: a token mixer and a channel mixer, each of which reads the residual stream and adds to it.

    Args:
        attention: the token mixer.
        feed_forward: the channel mixer.
        norm: makes a norm.
        norm_at: before the mixers, after them, or both.
        multiplier: factor on their outputs.
        dropout: after the token mixer, and after the channel mixer.
        parallel: whether the channel mixer reads the same input as the token mixer, instead of its output.
    """

    def __init__(
        self,
        attention: Attention,
        feed_forward: FeedForward,
        norm: Callable[[], nn.Module],
        *,
        norm_at: Literal["pre", "post", "both"] = "pre",
        dropout: Sequence[nn.Module | None] = (None, None),
        multiplier: float = 1.0,
        parallel: bool = False,
    ) -> None:
        super().__init__()
        before, after = norm_at != "post", norm_at != "pre"
        self.attention_norm = norm() if before else None
        self.attention = attention
        self.attention_post_norm = norm() if after else None
        self.feed_forward_norm = norm() if before else None
        self.feed_forward = feed_forward
        self.feed_forward_post_norm = norm() if after else None
        self.multiplier, self.parallel = multiplier, parallel
        self.attention_dropout, self.feed_forward_dropout = dropout

    def forward(
        self,
        x: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: Any = None,
        **prefix: Tensor,
    ) -> Tensor:
        h = x if self.attention_norm is None else self.attention_norm(x)
        h = self.attention(h, position_ids=position_ids, document_ids=document_ids, cache=cache, **prefix)
        given, x = x, self._added(x, h, self.attention_post_norm, self.attention_dropout)
        h = given if self.parallel else x
        h = h if self.feed_forward_norm is None else self.feed_forward_norm(h)
        return self._added(x, self.feed_forward(h), self.feed_forward_post_norm, self.feed_forward_dropout)

    def new_slots(self, slots: Slots) -> Any:
        """A cache for its attention, for rows that are generated side by side.

        Raises:
            TypeError: if it has none.
        """
        return slots_of({"": self.attention}, slots, slots.capacity)[""]

    def tensor_plan(self) -> dict[str, TensorStyle]:
        """Module → how tensor parallelism splits it, as declared by the attention and feed-forward modules."""
        plan: dict[str, TensorStyle] = {}
        for name in ("attention", "feed_forward"):
            beside = (f"{name}_norm", f"{name}_post_norm", f"{name}_dropout")
            plan |= {one: "sequence" for one in beside if getattr(self, one) is not None}
            inner = {"": "gather", **_plan(getattr(self, name))}
            plan |= {f"{name}.{path}".rstrip("."): style for path, style in inner.items()}
        return plan

    def flops_per_token(self, sequence: int) -> int:
        """Operations per token of a forward and a backward pass, with causal attention."""
        return sum(_flops(module, sequence) for module in (self.attention, self.feed_forward))

    def _added(self, x: Tensor, mixed: Tensor, *then: nn.Module | None) -> Tensor:
        for one in then:
            mixed = mixed if one is None else one(mixed)
        return x + mixed if self.multiplier == 1 else x + mixed * self.multiplier


class Transformer(nn.Module):
    """Embedding, blocks, final norm and head, in the form of Llama (Touvron et al. 2023, arXiv:2302.13971).

    A pipeline may remove modules: it sets the embedding, the norm, the tail, the head and `fusion.enter` to None, and
    deletes layers from `layers` and `fusion.layers`. The remaining modules keep their names.
    """

    def __init__(
        self,
        embedding: nn.Embedding,
        layers: Sequence[Block],
        norm: nn.Module,
        head: Any,
        *,
        max_sequence: int,
        tied: bool = False,
        embedding_multiplier: float = 1.0,
        dropout: nn.Module | None = None,
        positions: nn.Embedding | None = None,
        tail: Any = None,
    ) -> None:
        super().__init__()
        self.dim: int = embedding.embedding_dim
        self.embedding: nn.Module | None = embedding
        self.positions: nn.Module | None = positions
        self.embedding_dropout = dropout
        self.fusion: Any = None
        self.item_positions: ItemPositions | None = None
        self.prefix = False
        self.layers = nn.ModuleDict({str(index): layer for index, layer in enumerate(layers)})
        self.norm: nn.Module | None = norm
        self.tail: Any = tail
        self.head: Any = head
        self.max_sequence = max_sequence
        self.tied = tied
        self.embedding_multiplier = embedding_multiplier
        if tied:
            self.head.weight = embedding.weight

    def forward(
        self,
        x: Tensor,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: Mapping[str, Any] | None = None,
        **items: Tensor,
    ) -> Tensor:
        """Hidden states `[batch, sequence, dim]`, normed on the last part; in training with a tail, it adds more rows.

        Args:
            x: token ids `[batch, sequence]` on the first part, hidden states on later ones.
            positions: `[batch, sequence]` int64; by default 0, 1, …, continuing after what the cache holds.
            documents: `[batch, sequence]` int64; attention stays inside a document.
            cache: a result of `new_cache`, which this sequence extends. If the cache had to start again, the hidden
                states of all its tokens are returned, those of `x` last.
            items: extras of the batch: for the fusion, and where prefixes end.

        Raises:
            TypeError: if there are items, and no fusion to take them.
        """
        prefix = for_layers(items, x, cache) if self.prefix else {}
        if items and self.fusion is None:
            raise TypeError(f"the model takes no {format_list(items)}: no plugin is enabled that joins them with text")
        if cache and position_ids is None:
            x = cache.take(x) if isinstance(cache, RenewedCaches) else x
            position_ids = self._next_positions(x, cache)
        turned_by = layer_positions(self.item_positions, items, position_ids, document_ids, cache)
        if self.embedding is not None:
            ids, x = x, self.embedding(x)
            x = x if self.embedding_multiplier == 1 else x * self.embedding_multiplier
            x = x if self.positions is None else x + self.positions(row_positions(ids, position_ids))
            x = x if getattr(self.fusion, "enter", None) is None else self.fusion.enter(x, **items)
            x = x if self.embedding_dropout is None else self.embedding_dropout(x)
        joined = () if self.fusion is None else self.fusion.layers
        more = features(self.fusion, items, cache, 0 if position_ids is None else position_ids.shape[1])
        for index, layer in self.layers.items():
            x = self.fusion.layers[index](x, **more) if index in joined else x
            x = layer(x, turned_by, document_ids, cache[index] if cache else None, **prefix)
        x = x if self.norm is None else self.norm(x)
        return self.tail(x, turned_by, document_ids) if self.training and self.tail is not None else x

    def new_cache(self, batch: int, length: int) -> dict[str, Any]:
        """An empty cache for each layer, for `batch` sequences of at most `length` tokens.

        Raises:
            TypeError: if a layer's attention can't keep a cache, or its positions do not allow one.
            ValueError: if the length is greater than `max_sequence`.
        """
        if length > self.max_sequence:
            raise ValueError(f"the model supports at most {self.max_sequence} tokens, but {length} were requested")
        attention = {index: layer.attention for index, layer in self.layers.items()}
        caches = renewed(new_caches(attention, batch, length), [*attention.values()], length)
        if self.fusion is not None and isinstance(caches, RenewedCaches):
            raise TypeError("its caches start again from token ids, and items are none")
        return with_cache(caches, self.fusion, self.item_positions)

    def new_slots(self, slots: Slots) -> dict[str, Any]:
        """A cache for each layer, for rows that are generated side by side; a forward with it is given positions.

        Raises:
            TypeError: if a layer's attention has none, or keys change with the length of their row.
            ValueError: if rows may be longer than `max_sequence`.
        """
        attention = {index: layer.attention for index, layer in self.layers.items()}
        caches = slots_of(attention, slots, self.max_sequence)
        return with_cache(caches, self.fusion, self.item_positions, slots)

    def _next_positions(self, x: Tensor, cache: Mapping[str, Any]) -> Tensor:
        start = next(iter(cache.values())).length
        return torch.arange(start, start + x.shape[1], device=x.device).expand(x.shape[0], -1)

    # -- what the model declares ------------------------------------------------------------------

    @property
    def units(self) -> tuple[str, ...]:
        """Modules to shard, recompute and compile one by one."""
        both = {"fusion": self.fusion, "tail": self.tail}
        inner = (f"{name}.{unit}" for name, module in both.items() for unit in getattr(module, "units", ()))
        return (*self._layers, *inner)

    @property
    def _layers(self) -> tuple[str, ...]:
        return tuple(f"layers.{index}" for index in self.layers)

    @property
    def stages(self) -> tuple[tuple[str, ...], ...]:
        """Modules in the order data takes. A part is a run of neighbouring entries; an entry is never split."""
        entry = [one for one in ("positions", "embedding_dropout") if getattr(self, one) is not None]
        entry += ["fusion.enter"] if getattr(self.fusion, "enter", None) is not None else []
        first = [("embedding", *entry)] if self.embedding is not None else []
        tail = () if self.tail is None else ("tail",)
        last = [("norm", *tail, "head")] if self.head is not None else []
        layers = [(f"layers.{index}", *beside(self.fusion, index)) for index in self.layers]
        return (*first, *layers, *last)

    @property
    def roles(self) -> dict[str, str]:
        """Parameters that optimizers may treat differently: name → `embedding` or `head`. A tied weight counts as the
        embedding if the embedding is on this part."""
        roles = {f"head.{name}": "head" for name, _ in _parameters(self.head)}
        if self.tied and self.embedding is not None:
            roles.pop("head.weight", None)
        first = {one: getattr(self, one) for one in ("embedding", "positions")}
        return {
            f"{one}.{name}": "embedding" for one, module in first.items() for name, _ in _parameters(module)
        } | roles

    def hidden_shape(self, batch: int, sequence: int) -> tuple[int, ...]:
        """The shape of what a part passes to the next."""
        return batch, sequence, self.dim

    def tensor_plan(self) -> dict[str, TensorStyle]:
        """Module → how tensor parallelism splits it. Attention, feed-forward and head modules declare this for their
        own parts, and under the empty name for themselves (by default a block is `gather`, and a head is not split).

        Raises:
            TypeError: if one of them does not declare it.
        """
        plan: dict[str, TensorStyle] = {}
        if self.embedding is not None:
            plan["embedding"] = "vocabulary"
            plan |= {} if self.positions is None else {"positions": "vocabulary"}
            plan |= {} if self.embedding_dropout is None else {"embedding_dropout": "sequence"}
        for name, layer in zip(self._layers, self.layers.values(), strict=True):
            plan |= {f"{name}.{path}": style for path, style in _plan(layer).items()}
        for one in ("fusion", "tail"):
            if (module := getattr(self, one)) is not None:
                plan |= {f"{one}.{path}": style for path, style in _plan(module).items()}
        if self.norm is not None:
            plan["norm"] = "sequence"
        if self.head is not None:
            inner = self.head.tensor_plan() if hasattr(self.head, "tensor_plan") else {}
            plan |= {f"head.{path}".rstrip("."): style for path, style in inner.items()}
        return plan

    def flops_per_token(self, sequence: int) -> int:
        """Operations per token of a forward and a backward pass of this part, with causal attention.

        The input embedding is a look-up and is not counted.
        """
        heads = [self.head] * (1 + len(self.tail.units) if self.tail is not None else 1)
        modules = [*self.layers.values(), self.fusion, self.tail, *heads]
        return sum(_flops(module, sequence) for module in modules if module is not None)


def _parameters(module: nn.Module | None) -> Iterator[tuple[str, nn.Parameter]]:
    return iter(()) if module is None else module.named_parameters()


def _plan(module: Any) -> Mapping[str, TensorStyle]:
    if not hasattr(module, "tensor_plan"):
        raise TypeError(f"{type(module).__name__} does not say how tensor parallelism splits it (tensor_plan)")
    plan: Mapping[str, TensorStyle] = module.tensor_plan()
    return plan


def _flops(module: Any, sequence: int) -> int:
    """A module's own `flops_per_token`; if it declares none, each weight matrix is used once per token."""
    if hasattr(module, "flops_per_token"):
        return int(module.flops_per_token(sequence))
    return flops_per_token(sequence, weights=sum(p.numel() for p in module.parameters() if p.ndim > 1))
