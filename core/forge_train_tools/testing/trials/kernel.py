"""Trials of attention kernels: each capability that one declares, against the formula."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from forge_train.base.errors import ConfigError
from forge_train_kit.capabilities import KernelCapabilities, capabilities_of
from forge_train_kit.layers import AttentionOptions
from forge_train_kit.model.attention_dropout import DroppedWeights

from ..bench import Bench, Trials, close
from ..conformance import SkippedError, require

BATCH, SEQUENCE, HEADS = 2, 12, 4


@dataclass(frozen=True)
class Case:
    """One call of a kernel."""

    kv_heads: int = 2
    queries: int = SEQUENCE
    asked: dict[str, Any] = field(default_factory=dict)


def oracle(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> tuple[Tensor, ...]:
    """Attention as its formula has it, in double precision; the output, and the log-sum-exp if asked for."""
    query, key, value = query.double(), key.double(), value.double()
    group = query.shape[2] // key.shape[2]
    key, value = key.repeat_interleave(group, dim=2), value.repeat_interleave(group, dim=2)
    logits = torch.einsum("bqhd,bkhd->bhqk", query, key) * options.factor(query)
    if (soft_cap := options.soft_cap) is not None:
        logits = soft_cap * (logits / soft_cap).tanh()
    queries, keys, offset = query.shape[1], key.shape[1], options.first_query(query, key)
    rows, columns = (
        torch.arange(offset, offset + queries, device=key.device)[:, None],
        torch.arange(keys).to(key.device),
    )
    seen = columns <= rows
    if options.window is not None:
        seen = seen & (rows - columns < options.window)
    if options.prefix_ends is not None:
        seen = seen | (columns < options.prefix_ends[:, None, :, None])
    if (ids := options.document_ids) is not None:
        own = ids[:, offset : offset + queries] if options.query_document_ids is None else options.query_document_ids
        seen = seen & (own[:, None, :, None] == ids[:, None, None, :])
    if options.lengths is not None:
        seen = (columns < options.lengths[:, None])[:, None, None]
    blind = ~seen.any(-1, keepdim=True)
    logits = logits.masked_fill(~seen, float("-inf"))
    if options.sinks is not None:
        logits = torch.cat([logits, options.sinks.double()[None, :, None, None].expand(BATCH, -1, queries, 1)], dim=-1)
    weights = logits.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)[..., :keys]
    weights = weights if options.dropout is None else options.dropout(weights, offset)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, value)
    if not options.log_sum_exp:
        return (out,)
    return out, logits.masked_fill(blind, 0).logsumexp(-1).masked_fill(blind[..., 0], float("-inf"))


def cases(able: KernelCapabilities) -> Iterator[tuple[str, Case]]:
    """Yield the calls that a kernel is tested with."""
    yield "all heads apart", Case(HEADS)
    yield "grouped heads", Case()
    yield "one key head", Case(1)
    yield "another scale", Case(asked={"scale": 0.5})
    documents = {"document_ids": (torch.arange(SEQUENCE) >= 5).long().expand(BATCH, -1)}
    if able.documents:
        yield "documents", Case(asked=documents)
    if able.offsets:
        yield "one query, more keys", Case(queries=1)
        yield "some queries, more keys", Case(queries=5)
        yield "queries in the middle", Case(queries=5, asked={"offset": 3})
        yield "one query in the middle", Case(queries=1, asked={"offset": 6})
    if able.windows:
        yield "a window", Case(asked={"window": 4})
        yield "a window wider than the sequence", Case(asked={"window": 2 * SEQUENCE})
    if able.windows and able.documents:
        yield "a window and documents", Case(asked={"window": 3, **documents})
    if able.windows and able.offsets:
        yield "a window and more keys", Case(queries=3, asked={"window": 4})
    if able.documents and able.offsets:
        yield "documents and more keys", Case(queries=6, asked=documents)
    if able.dropout:
        yield from _dropping(able)
    if able.soft_caps:
        yield "a soft cap", Case(asked={"soft_cap": 0.7})
    if able.sinks:
        yield "sinks", Case(asked={"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])})
    if able.log_sum_exp:
        yield "the log-sum-exp", Case(asked={"log_sum_exp": True})
    if able.lengths:
        yield "rows of different lengths", Case(queries=1, asked={"lengths": torch.tensor([5, SEQUENCE])})
    yield from _with_prefixes(able)
    if able.blocks:
        apart: dict[str, Any] = {"query_document_ids": None, "offset": SEQUENCE}
        yield "a block before the queries", Case(queries=5, asked=apart)
        if able.documents:
            apart["query_document_ids"] = torch.tensor([1, 1, 2, 2, 2]).expand(BATCH, -1)
            yield "queries that see nothing of a block", Case(queries=5, asked={**documents, **apart})
        if able.documents and able.log_sum_exp:
            yield "the log-sum-exp of nothing", Case(queries=5, asked={**documents, **apart, "log_sum_exp": True})


def _with_prefixes(able: KernelCapabilities) -> Iterator[tuple[str, Case]]:
    """Of different lengths in the rows, and beyond documents and windows."""
    if not able.prefixes:
        return
    ends = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)
    ends[0, :4], ends[1, :9] = 4, 9
    yield "prefixes", Case(asked={"prefix_ends": ends})
    if able.windows:
        yield "prefixes and a window", Case(asked={"prefix_ends": ends, "window": 2})
    if able.documents:
        of_documents = torch.zeros_like(ends)
        of_documents[0, 5:8], of_documents[1, :3] = 8, 3
        documents = (torch.arange(SEQUENCE) >= 5).long().expand(BATCH, -1)
        yield "prefixes of documents", Case(asked={"prefix_ends": of_documents, "document_ids": documents})
    if able.offsets:
        yield (
            "prefixes that begin before the queries",
            Case(queries=5, asked={"prefix_ends": ends[:, 2:7], "offset": 2}),
        )


def _dropping(able: KernelCapabilities) -> Iterator[tuple[str, Case]]:
    """With heads and keys that are not the first of the model and of the row."""
    heads = torch.arange(4, 4 + HEADS, dtype=torch.int32)
    dropped = DroppedWeights(0.25, torch.tensor([7, -3], dtype=torch.int32), heads, start=2)
    yield "dropout", Case(asked={"dropout": dropped})
    if able.offsets:
        yield "dropout and queries in the middle", Case(queries=5, asked={"dropout": dropped, "offset": 3})
    if able.log_sum_exp:
        yield "the log-sum-exp of all weights", Case(asked={"dropout": dropped, "log_sum_exp": True})


def agrees_with_its_formula(bench: Bench) -> str:
    """On every device that is here; in bf16 where the kernel refuses fp32."""
    able = capabilities_of(bench.enabled.cls)
    return "; ".join(_agrees(bench, able, device) for device in _devices(bench))


def _agrees(bench: Bench, able: KernelCapabilities, device: torch.device) -> str:
    kernel, dtype = _kernel(bench, device)
    head_dim, looser = min(able.head_dims, default=8), 1 if dtype is torch.float32 else 200
    done = []
    for what, case in cases(able):
        shapes = (BATCH, case.queries, HEADS, head_dim), *[(BATCH, SEQUENCE, case.kv_heads, head_dim)] * 2
        query, key, value = (torch.randn(s, device=device, dtype=dtype, requires_grad=True) for s in shapes)
        given = {"query": query, "key": key, "value": value}
        asked: dict[str, Any] = {
            name: one.to(device) if isinstance(one, Tensor | DroppedWeights) else one
            for name, one in case.asked.items()
        }
        if "sinks" in asked:
            given["sinks"] = asked["sinks"].requires_grad_()
        options = AttentionOptions(**asked)
        got, wanted = kernel(query, key, value, options), oracle(query, key, value, options)
        got = got if isinstance(got, tuple) else (got,)
        require(len(got) == len(wanted), f"{what}: gives {len(got)} tensors, {len(wanted)} were asked for")
        for name, one, other in zip(("output", "log-sum-exp"), got, wanted, strict=False):
            nothing = other == -torch.inf
            require(torch.equal(one == -torch.inf, nothing), f"{what}: {name} is not −∞ just where nothing is seen")
            close(one.masked_fill(nothing, 0), other.float().masked_fill(nothing, 0), f"{what}: {name}", 1e-4 * looser)
        weights = [torch.randn(one.shape, device=device) for one in wanted]
        totals = [sum((one * by).sum() for one, by in zip(some, weights, strict=True)) for some in (got, wanted)]
        gradients = [torch.autograd.grad(total, list(given.values())) for total in totals]
        for name, one, other in zip(given, *gradients, strict=True):
            close(one, other.float(), f"{what}: gradient of the {name}", 1e-3 * looser)
        done.append(what)
    on = "" if device.type == "cpu" else f"on {device.type}, {str(dtype).removeprefix('torch.')}: "
    return on + ", ".join(done)


def _kernel(bench: Bench, device: torch.device) -> tuple[Any, torch.dtype]:
    """The plugin's kernel for a device, and the dtype that it computes in there."""
    cls, config = bench.enabled.cls, bench.job.config.sections.get(bench.enabled.name)
    if device.type == "cpu":
        return bench.answer("attention_kernel"), torch.float32
    refusal: ConfigError | None = None
    tried: dict[Literal["fp32", "bf16"], torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
    for precision, dtype in tried.items():
        made: Any = cls(config if config is not None else cls.Config())  # a plugin may keep its kernel
        try:
            return made.attention_kernel(job=bench.job_on(device, precision)), dtype
        except ConfigError as error:
            refusal = error
    raise SkippedError(str(refusal))


def _devices(bench: Bench) -> list[torch.device]:
    devices = bench.enabled.cls.devices
    here = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if found := [torch.device(device) for device in devices or ("cpu", "cuda") if here.get(device)]:
        return found
    raise SkippedError(f"it runs on {', '.join(devices)} only, and there is none here")


def refuses_what_it_does_not_declare(bench: Bench) -> str:
    """Options that a kernel ignores would give wrong attention without an error."""
    able = capabilities_of(bench.enabled.cls)
    device = _devices(bench)[0]
    kernel, dtype = _kernel(bench, device)
    shape = BATCH, SEQUENCE, HEADS, min(able.head_dims, default=8)
    query = torch.randn(shape, device=device, dtype=dtype)
    numbers = torch.arange(HEADS, dtype=torch.int32, device=device)
    documents, few = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64, device=device), SEQUENCE // 2
    calls = [
        ("documents", SEQUENCE, AttentionOptions(document_ids=documents)),
        ("offsets", few, AttentionOptions()),
        ("offsets", few, AttentionOptions(offset=1)),
        ("blocks", few, AttentionOptions(offset=SEQUENCE)),
        ("windows", SEQUENCE, AttentionOptions(window=4)),
        ("dropout", SEQUENCE, AttentionOptions(dropout=DroppedWeights(0.25, numbers[:BATCH], numbers))),
        ("soft_caps", SEQUENCE, AttentionOptions(soft_cap=0.7)),
        ("sinks", SEQUENCE, AttentionOptions(sinks=torch.zeros(HEADS, device=device))),
        ("log_sum_exp", SEQUENCE, AttentionOptions(log_sum_exp=True)),
        ("lengths", 1, AttentionOptions(lengths=torch.full((BATCH,), few, device=device))),
        ("prefixes", SEQUENCE, AttentionOptions(prefix_ends=torch.full_like(documents, SEQUENCE))),
    ]
    if able.documents:
        of_queries = documents[:, :few]
        calls.append(("blocks", few, AttentionOptions(document_ids=documents, query_document_ids=of_queries, offset=1)))
    asked = [(flag, queries, one) for flag, queries, one in calls if not getattr(able, flag)]
    for flag, queries, one in asked:
        try:
            kernel(query[:, :queries], query, query, one)
        except ConfigError:
            continue
        require(False, f"ignores {flag}, which it does not declare; call options.check(…) first")
    return ", ".join(dict.fromkeys(flag for flag, *_ in asked)) or "it declares everything"


TRIALS: Trials = {
    "attention_kernel": [
        ("agrees with the formula", agrees_with_its_formula),
        ("refuses what it does not declare", refuses_what_it_does_not_declare),
    ]
}
