"""Attention kernels against `eager` in float64, by capability, dtype and length."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from forge_train import ConfigError
from forge_train.registry.discovery import discover, load
from forge_train_kit.capabilities import KernelCapabilities
from forge_train_kit.layers import AttentionOptions
from forge_train_kit.model import DroppedWeights
from forge_train_plugins.attention._eager import Kernel as Eager
from forge_train_plugins.attention._packed.versions import missing as missing_flash
from forge_train_plugins.attention._sdpa import missing as missing_backend

from .case import LacksError, Row, Size

BARS = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 1.6e-2}
"""Largest error of a result, relative to its norm, or to that of the largest gradient: some units of the last place."""
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HEADS, KV_HEADS, HEAD_DIM = 2, 1, 64
"""Few, because `eager` holds several times heads × 8,192² numbers in float64, and cases run beside each other."""
LENGTHS, TOY = (1, 127, 8192), (1, 127)
PAIRS = ("documents", "windows", "offsets")
"""Capabilities that are tried in pairs too."""
CHOOSERS = ("auto",)
"""Kernels that only choose among the others."""


def kernels() -> list[tuple[str, dict[str, Any]]]:
    """Names of attention kernels, each with the values of its section."""
    names = [one.name for one in discover() if "attention_kernel" in one.hooks and one.name not in CHOOSERS]
    backends = [("sdpa", {"backend": one}) for one in ("auto", "flash", "efficient", "cudnn", "math")]
    return backends + [(name, {}) for name in sorted(names) if name != "sdpa"]


def check(size: Size, kernel: str, precision: str, **section: Any) -> list[Row]:
    """A row for each length and capability of one kernel in one dtype.

    Raises:
        LacksError: if the kernel's package is not installed.
    """
    if kernel == "flash" and (why := missing_flash("auto")):
        raise LacksError(why)
    cls = load(next(one for one in discover() if one.name == kernel))
    able = cls.kernel_capabilities or KernelCapabilities()
    device, dtype = torch.device(size.device), PRECISIONS[precision]
    job: Any = SimpleNamespace(
        device=device,
        config=SimpleNamespace(train=SimpleNamespace(precision=precision)),
        hooks=SimpleNamespace(opened=False, call=lambda *_: []),
    )
    try:
        made = cls(cls.Config(**section) if section else cls.Config()).attention_kernel(job)
    except ConfigError as error:
        return [Row(f"{kernel} in {precision}", "refused", str(error).splitlines()[0])]
    rows = []
    backend = section.get("backend", "auto")
    for length in size.choose(LENGTHS, TOY):
        for flags in asked_for(able):
            masked = bool({"documents", "windows", "prefixes"} & set(flags))
            if backend != "auto" and missing_backend(backend, device, precision, masked=masked):
                continue
            for name, keywords in ways(flags, length, device):
                rows.append(_row(made, f"{length} tokens, {name}", keywords, length, dtype, device))
    return rows


def asked_for(able: KernelCapabilities) -> Iterator[tuple[str, ...]]:
    """Nothing, each capability that a kernel has, and pairs of some."""
    mine = [one.name for one in fields(able) if getattr(able, one.name) is True]
    yield ()
    yield from ((one,) for one in mine)
    yield from combinations([one for one in PAIRS if one in mine], 2)


def ways(flags: tuple[str, ...], length: int, device: torch.device) -> Iterator[tuple[str, dict[str, Any]]]:
    """Keywords that ask for capabilities; `queries` is how many of the last positions ask."""
    some = max(length // 3, 1)
    ids = documents(length, device)
    one: dict[str, dict[str, Any]] = {
        "documents": {"document_ids": ids},
        "offsets": {"queries": some},
        "windows": {"window": max(length // 5, 1)},
        "dropout": {
            "dropout": DroppedWeights(
                0.25,
                torch.tensor([7], dtype=torch.int32, device=device),
                torch.arange(HEADS, dtype=torch.int32, device=device),
            )
        },
        "soft_caps": {"soft_cap": 0.7},
        "sinks": {"sinks": torch.linspace(-1, 2, HEADS, device=device)},
        "log_sum_exp": {"log_sum_exp": True},
        "blocks": {"queries": some, "offset": length - some // 2, "document_ids": None, "query_document_ids": None},
        "lengths": {"queries": 1, "lengths": torch.tensor([some], device=device)},
        "prefixes": {"prefix_ends": some * (torch.arange(length, device=device) < some)[None]},
    }
    keywords: dict[str, Any] = {}
    for flag in flags:
        keywords |= one[flag]
    yield " and ".join(flags) or "causal", keywords


def documents(length: int, device: torch.device) -> Tensor:
    """Documents of 1, 2, 3, … tokens, the last cut."""
    sizes = torch.arange(1, length + 1)
    return torch.repeat_interleave(sizes, sizes)[:length].to(device)[None]


def dirty(device: torch.device) -> None:
    """Have the allocator give out memory that holds NaN."""
    held = [torch.full((2**power,), torch.nan, device=device) for power in range(8, 25, 2) for _ in range(2)]
    del held


def _row(
    kernel: Any, name: str, keywords: dict[str, Any], length: int, dtype: torch.dtype, device: torch.device
) -> Row:
    keywords = dict(keywords)
    queries = keywords.pop("queries", length)
    generator = torch.Generator().manual_seed(length)
    shapes = ((queries, HEADS), (length, KV_HEADS), (length, KV_HEADS))
    drawn = [torch.randn(1, *shape, HEAD_DIM, generator=generator) for shape in shapes]
    drawn[2] /= HEAD_DIM**0.5  # gradients of all three are then of one size
    given = [one.to(device, dtype).requires_grad_() for one in drawn]
    exact = [one.detach().double().requires_grad_() for one in given]
    if "sinks" in keywords:
        given.append(keywords["sinks"].to(dtype).requires_grad_())
        exact.append(given[-1].detach().double().requires_grad_())
    wanted = _results(Eager(), exact, keywords)
    dirty(device)
    found = _results(kernel, given, keywords)
    if any(one.dtype != dtype and one.dtype is not torch.float32 for one in found):
        return Row(name, f"gave {found[0].dtype}", str(dtype), ok=False)
    outputs = len(found) - len(given)
    scale = max(float(one.norm()) for one in wanted[outputs:])
    errors = [_error(*pair) for pair in zip(found[:outputs], wanted, strict=False)]
    errors += [float((f.double() - w).norm()) / scale for f, w in zip(found[outputs:], wanted[outputs:], strict=True)]
    worst = largest(errors)
    bar = BARS[dtype]
    return Row(name, f"{worst:.1e}", f"≤ {bar:.1e}", ok=worst <= bar)


def largest(errors: list[float]) -> float:
    """The largest error; NaN is the largest of all."""
    return max(errors, key=lambda error: float("inf") if math.isnan(error) else error)


def _error(found: Tensor, wanted: Tensor) -> float:
    """Relative to the norm; −∞ where −∞ is wanted is none."""
    blind = wanted.isinf()
    if not torch.equal(found.isinf(), blind):
        return float("inf")
    found, wanted = found.double().masked_fill(blind, 0), wanted.double().masked_fill(blind, 0)
    return float((found - wanted).norm() / wanted.norm().clamp_min(1.0))


def _results(kernel: Any, given: list[Tensor], keywords: dict[str, Any]) -> list[Tensor]:
    """What it gives, and the gradients of all inputs."""
    if "sinks" in keywords:
        keywords = {**keywords, "sinks": given[3]}
    out = kernel(*given[:3], AttentionOptions(**keywords))
    out = out if isinstance(out, tuple) else (out,)
    generator = torch.Generator().manual_seed(1)
    total: Any = 0
    for one in out:
        weight = torch.randn(one.shape, generator=generator).to(one.device)
        seen = one.isfinite()
        total = total + (torch.where(seen, one, 0).double() * weight).sum()
    return [*(one.detach() for one in out), *torch.autograd.grad(total, given)]
