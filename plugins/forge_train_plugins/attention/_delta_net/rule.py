"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464), in chunks and in steps.

A head's state S, `[k_dim, v_dim]`, starts at zero, and at each token becomes

    S ← exp(g) · S
    S ← S + k ⊗ β (v − k S)

and the token's output is q S. Both forms compute in fp32, or wider if their inputs are wider.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def in_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    size: int,
    state: Tensor | None = None,
    document_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Chunk by chunk, all tokens of a chunk at once, by the WY representation (§3.3; arXiv:2406.06484, §3.2).

    Args:
        query: `[batch, sequence, k_heads, k_dim]`, scaled.
        key: as `query`, of length one at most.
        value: `[batch, sequence, heads, v_dim]`; heads is a multiple of k_heads, and neighbouring heads share a key
            head.
        log_decay: g, `[batch, sequence, heads]`, at most 0.
        beta: `[batch, sequence, heads]`, from 0 to 1.
        size: tokens in a chunk.
        state: initial state, `[batch, heads, k_dim, v_dim]`; zeros by default.
        document_ids: `[batch, sequence]`: each document starts with a zero state, except the first, which starts with
            `state`.

    Returns:
        Outputs shaped like `value`, and the state after the last token.
    """
    length, (k_heads, k_dim), (heads, v_dim) = query.shape[1], query.shape[2:], value.shape[2:]
    size, dtype = min(size, length), torch.promote_types(query.dtype, torch.float32)

    def chunks(x_BTHD: Tensor) -> Tensor:
        """`[batch, k_heads, heads of each, chunk, token, features]`; the padding of the last chunk changes nothing."""
        filled = F.pad(x_BTHD.to(dtype), (0, 0, 0, 0, 0, -length % size))
        return torch.unflatten(torch.unflatten(filled, 1, (-1, size)).permute(0, 3, 1, 2, 4), 1, (k_heads, -1))

    q, k, v = chunks(query), chunks(key), chunks(value)
    decay, strength = chunks(log_decay[..., None]), chunks(beta[..., None])
    seen = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    # Summed for each pair: a difference of sums from the beginning would lose precision after a large one.
    sums = _running_sum(torch.where(seen.tril(-1), decay, 0.0))
    since, until = _running_sum(decay)[..., 0].exp(), sums[..., -1, :].exp()  # since the chunk's start; until its end
    kept = since[..., -1]
    if document_ids is not None:
        ids = _filled_up(document_ids, size)[:, None, None]
        before = torch.cat((ids[..., :1, 0], ids[..., :-1, -1]), -1)  # the last token of the previous chunk
        seen = seen & (ids[..., :, None] == ids[..., None, :])
        since = since * (ids == before[..., None])
        until = until * (ids == ids[..., -1:])
        kept = kept * (ids[..., -1] == before)
    between = sums.masked_fill(~seen, -torch.inf).exp()

    # What each token writes from its own chunk alone, and what to subtract for the state before the chunk.
    system = strength * (k @ k.mT) * between
    sides = torch.cat((strength * v, (strength * since[..., None]) * k), -1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    own, taken = torch.split(solved, [v_dim, k_dim], -1)
    to_state = (k * until[..., None]).mT

    if state is None:
        state = q.new_zeros(len(q), heads, k_dim, v_dim)
    now = torch.unflatten(state.to(dtype), 1, (k_heads, -1))
    states, written = [], []
    for chunk in range(q.shape[3]):
        states.append(now)
        written.append(own[..., chunk, :, :] - taken[..., chunk, :, :] @ now)
        now = kept[..., chunk, None, None] * now + to_state[..., chunk, :, :] @ written[-1]
    within = (q @ k.mT) * between
    out = (q * since[..., None]) @ torch.stack(states, 3) + within @ torch.stack(written, 3)
    out_BTHV = out.flatten(1, 2).permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :length]
    return out_BTHV, now.flatten(1, 2)


def in_steps(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Token by token; see `in_chunks`."""
    each = value.shape[2] // query.shape[2]
    query, key = (x.to(state.dtype).repeat_interleave(each, 2) for x in (query, key))
    found = []
    for token in range(query.shape[1]):
        q_BHD, k_BHD, v_BHV = query[:, token], key[:, token], value[:, token].to(state.dtype)
        state = state * log_decay[:, token, :, None, None].to(state.dtype).exp()
        change_BHV = beta[:, token, :, None] * (v_BHV - (k_BHD[..., None, :] @ state)[..., 0, :])
        state = state + k_BHD[..., None] * change_BHV[..., None, :]
        found.append((q_BHD[..., None, :] @ state)[..., 0, :])
    return torch.stack(found, 1), state


def _running_sum(x: Tensor) -> Tensor:
    """The sums over the last axis but one, up to each row; deterministic on CUDA, where torch's own (2.13) is not."""
    if not (x.is_cuda and torch.are_deterministic_algorithms_enabled()):
        return x.cumsum(-2)
    reach = 1
    while reach < x.shape[-2]:
        x = x + F.pad(x[..., :-reach, :], (0, 0, reach, 0))
        reach *= 2
    return x


def _filled_up(document_ids: Tensor, size: int) -> Tensor:
    """`[batch, chunk, token]`; the last chunk is padded with the last token's document."""
    missing = -document_ids.shape[1] % size
    filled = torch.cat((document_ids, document_ids[:, -1:].expand(-1, missing)), 1)
    return torch.unflatten(filled, 1, (-1, size))
