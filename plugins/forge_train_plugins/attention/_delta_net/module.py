"""The module of the `delta_net` plugin."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from forge_train import Init
from forge_train.mesh.tensors import local
from forge_train_kit.layers import Layer
from forge_train_kit.model import Linear, RMSNorm, RowMemory, Slots, TensorStyle, flops_per_token

from .cache import DeltaCache
from .rule import in_chunks, in_steps

Part = tuple[int, int]
"""Index and number of equal parts of this rank's heads."""


@dataclass(frozen=True)
class Sizes:
    """Numbers of heads and features."""

    heads: int
    """Value heads, each with a state."""
    k_heads: int
    k_dim: int
    v_dim: int
    taps: int
    """Tokens that a convolution sees."""


class ShortConvolution(nn.Module):
    """A depthwise causal convolution over a few tokens, then SiLU: `[batch, sequence, heads, head_dim]` → the same.

    Args:
        features: number of features of all heads.
        taps: kernel size: a token and those before it.
        name: name of the parameter in this model, so that each has its own initial values.
        head_dim: features that tensor parallelism keeps together.
    """

    def __init__(self, features: int, taps: int, name: str, head_dim: int) -> None:
        super().__init__()
        self.taps, self.name, self.head_dim = taps, name, head_dim
        # Three axes, as in torch's convolutions, so that optimizers do not treat it as a matrix between hidden states.
        self.weight = nn.Parameter(torch.empty(features, 1, taps))

    def initial(self, name: str) -> Init:
        """Initialised as torch's own convolutions: uniform, ±1/√taps."""
        return Init("given", values=partial(uniform, self.name, tuple(self.weight.shape), self.taps**-0.5))

    def forward(
        self, x: Tensor, tail: Tensor | None = None, document_ids: Tensor | None = None, part: Part = (0, 1)
    ) -> tuple[Tensor, Tensor]:
        """Computes in fp32 or wider.

        Args:
            x: `[batch, sequence, heads, head_dim]`, of this part.
            tail: the previous inputs, `[batch, taps - 1, heads, head_dim]`; zeros by default.
            document_ids: `[batch, sequence]`: each document starts after zeros, but the first one after `tail`.
            part: the part whose weights to use.

        Returns:
            An output of the same shape, and the tail for the next call.
        """
        length, before = x.shape[1], self.taps - 1
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        # Inputs keep the axis of heads. Otherwise the gradient has the strides of the rule's axes, and a compiled
        # backward pass for dynamic sizes makes a view of it as if its last two axes were one, which fails (torch 2.13).
        weight = torch.unflatten(of_part(local(self.weight), part)[:, 0].to(x.dtype), 0, (-1, self.head_dim))
        x = F.pad(x, (0, 0, 0, 0, before, 0)) if tail is None else torch.cat((tail, x), 1)
        ids = None
        if document_ids is not None:
            ids = torch.cat((document_ids[:, :1].expand(-1, before), document_ids), 1)
        found = x[:, before:] * weight[..., -1]
        for back in range(1, self.taps):
            earlier = x[:, before - back : before - back + length]
            if ids is not None:
                same = ids[:, before - back : before - back + length] == ids[:, before:]
                earlier = torch.where(same[..., None, None], earlier, 0.0)
            found = torch.addcmul(found, earlier, weight[..., -1 - back])
        tail = x[:, length:]
        if ids is not None:
            tail = torch.where((ids[:, length:] == ids[:, -1:])[..., None, None], tail, 0.0)
        return F.silu(found), tail

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, taps={self.taps}"


class Decay(nn.Module):
    """The log decay of each head at a token, `g = −exp(A_log) · softplus(x + dt_bias)`: `[…, heads]` → the same, in
    fp32 or wider (Mamba 2, arXiv:2405.21060, §7)."""

    def __init__(self, heads: int, name: str) -> None:
        super().__init__()
        self.name = name
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))

    def initial(self, name: str) -> Init:
        """Initialised as in Mamba 2 and the released Gated DeltaNet: exp(A_log) is uniform from 0 to 16,
        softplus(dt_bias) is log-uniform from 0.001 to 0.1."""
        values = log_rates if name == "A_log" else step_biases
        return Init("given", values=partial(values, f"{self.name}.{name}", len(self.A_log)))

    def forward(self, x: Tensor, part: Part = (0, 1)) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        rate, bias = (of_part(local(one), part).to(dtype) for one in (self.A_log, self.dt_bias))
        return -rate.exp() * F.softplus(x.to(dtype) + bias)


class GatedDeltaNet(nn.Module):
    """Linear attention by the gated delta rule (arXiv:2412.06464, figure 1), with grouped values as in Qwen3-Next.

    The numbers of heads are read from the projections' outputs, so that each rank may hold some of the heads.
    """

    def __init__(self, layer: Layer, sizes: Sizes, chunk: int, *, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.heads, self.kv_heads, self.sizes, self.chunk = sizes.heads, sizes.k_heads, sizes, chunk
        dim, std, name = layer.dim, layer.std, f"layers.{layer.index}"
        keys, values = sizes.k_heads * sizes.k_dim, sizes.heads * sizes.v_dim
        # Tensor parallelism keeps a head's features together, as the convolutions declare.
        self.q = Linear(dim, keys, std=std)
        self.k = Linear(dim, keys, std=std)
        self.v = Linear(dim, values, std=std)
        self.gate = Linear(dim, values, std=std)
        self.alpha = Linear(dim, sizes.heads, std=std)
        self.beta = Linear(dim, sizes.heads, std=std)
        self.q_conv = ShortConvolution(keys, sizes.taps, f"{name}.q_conv", sizes.k_dim)
        self.k_conv = ShortConvolution(keys, sizes.taps, f"{name}.k_conv", sizes.k_dim)
        self.v_conv = ShortConvolution(values, sizes.taps, f"{name}.v_conv", sizes.v_dim)
        self.decay = Decay(sizes.heads, f"{name}.decay")
        self.norm = RMSNorm(sizes.v_dim, layer.norm_eps)
        self.o = Linear(values, dim, std=layer.output_std)
        taken = (one.weight.numel() for one in self.modules() if isinstance(one, nn.Linear | ShortConvolution))
        self.weights = sum(taken)

    def forward(
        self,
        x: Tensor,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: DeltaCache | RowMemory | None = None,
    ) -> Tensor:
        """`[batch, sequence, dim]` → the same; `document_ids`: `[batch, sequence]` int64 or None.

        Raises:
            ValueError: for document ids with a cache that already holds tokens.
        """
        sizes = self.sizes
        q, k = (torch.unflatten(one(x), -1, (-1, sizes.k_dim)) for one in (self.q, self.k))
        v, gate = (torch.unflatten(one(x), -1, (-1, sizes.v_dim)) for one in (self.v, self.gate))
        inputs = q, k, v, self.alpha(x)[..., None], self.beta(x)[..., None]
        if cache is None:
            mixed = self.recurrence(*inputs, document_ids=document_ids)
        elif isinstance(cache, RowMemory):
            held = cache.take()
            mixed, *then = self._run(inputs, document_ids, (0, 1), held)
            cache.put(*then)
            mixed = mixed.to(v.dtype)
        else:
            mixed = self._continued(inputs, document_ids, cache)
        out = self.norm(mixed) * F.silu(gate.to(torch.promote_types(gate.dtype, torch.float32)))
        projected: Tensor = self.o(out.to(gate.dtype).flatten(2))
        return projected

    def recurrence(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        alpha: Tensor,
        beta: Tensor,
        *,
        document_ids: Tensor | None = None,
        part: Part = (0, 1),
    ) -> Tensor:
        """All that mixes along the sequence: `[batch, sequence, heads of its kind, features]` each → like `v`."""
        given = (q, k, v, alpha, beta), document_ids, part

        def run(*given: Any) -> Tensor:
            return self._run(*given)[0].to(v.dtype)

        if not self.recompute or not torch.is_grad_enabled():
            return run(*given)
        mixed: Tensor = checkpoint(run, *given, use_reentrant=False, preserve_rng_state=False)
        return mixed

    def new_cache(self, batch: int, length: int) -> DeltaCache:
        return DeltaCache(batch, length)

    def new_slots(self, slots: Slots) -> RowMemory:
        return RowMemory(slots)

    def flops_per_token(self, sequence: int) -> int:
        """Counts the state as read twice, for the key and the query, and written once, at any length."""
        return flops_per_token(sequence, weights=self.weights + 3 * self.heads * self.sizes.k_dim * self.sizes.v_dim)

    def tensor_plan(self) -> dict[str, TensorStyle]:
        columns: tuple[str, ...] = ("q", "k", "v", "gate", "alpha", "beta")
        split: dict[str, TensorStyle] = dict.fromkeys(columns, "colwise")
        own: dict[str, TensorStyle] = dict.fromkeys(("q_conv", "k_conv", "v_conv", "decay"), "channels")
        return {**split, **own, "norm": "heads", "o": "rowwise"}

    def _continued(self, inputs: tuple[Tensor, ...], document_ids: Tensor | None, cache: DeltaCache) -> Tensor:
        v = inputs[2]
        cache.expect(*v.shape[:2])
        if cache.length and document_ids is not None:
            raise ValueError("A cache does not store document ids; pass document_ids only with an empty cache.")
        mixed, *cache.held = self._run(inputs, document_ids, (0, 1), cache.held)
        cache.length += v.shape[1]
        return mixed.to(v.dtype)

    def _run(
        self, inputs: tuple[Tensor, ...], document_ids: Tensor | None, part: Part, held: Sequence[Tensor] = ()
    ) -> tuple[Tensor, ...]:
        """The outputs, and the state and tails that follow, from those before (`DeltaCache.held`)."""
        alpha, beta = (x[..., 0] for x in inputs[3:])
        state, *tails = held or (None, None, None, None)
        convolutions = zip((self.q_conv, self.k_conv, self.v_conv), inputs[:3], tails, strict=True)
        pairs = [one(x, tail, document_ids, part) for one, x, tail in convolutions]
        q, k, v = (one for one, _ in pairs)
        q, k = unit(q) * self.sizes.k_dim**-0.5, unit(k)
        g, strength = self.decay(alpha, part), beta.to(q.dtype).sigmoid()
        if state is not None and v.shape[1] == 1:
            out, state = in_steps(q, k, v, g, strength, state)
        else:
            out, state = in_chunks(q, k, v, g, strength, size=self.chunk, state=state, document_ids=document_ids)
        return out, state, *(tail for _, tail in pairs)


def unit(x: Tensor) -> Tensor:
    """Normalised to length one, except a zero vector; with Qwen3-Next's epsilon."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def of_part(x: Tensor, part: Part) -> Tensor:
    """One part along the first axis."""
    return x if part[1] == 1 else x.chunk(part[1])[part[0]]


# -- initial values -------------------------------------------------------------------------------


def uniform(name: str, shape: tuple[int, ...], bound: float, seed: int) -> Tensor:
    return torch.empty(shape).uniform_(-bound, bound, generator=_generator(name, seed))


def log_rates(name: str, heads: int, seed: int) -> Tensor:
    """Kept away from zero, whose logarithm is −∞."""
    return torch.empty(heads).uniform_(0, 16, generator=_generator(name, seed)).clamp(min=1e-4).log()


def step_biases(name: str, heads: int, seed: int) -> Tensor:
    """Softplus turns these into steps from 0.001 to 0.1."""
    lowest, highest = torch.tensor([0.001, 0.1]).log()
    steps = torch.lerp(lowest, highest, torch.rand(heads, generator=_generator(name, seed))).exp()
    return steps + torch.log(-torch.expm1(-steps))


def _generator(name: str, seed: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
