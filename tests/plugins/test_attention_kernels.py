"""Every installed attention kernel against the eager reference, in each capability that it declares and in pairs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import Tensor

import fakes
from crossed import few
from forge_train import ConfigError, Plugin, hookimpl
from forge_train.registry.discovery import discover, load
from forge_train_kit.capabilities import KernelCapabilities
from forge_train_kit.layers import AttentionOptions
from forge_train_kit.model import DroppedWeights
from forge_train_kit.source import Source
from forge_train_plugins.attention._eager import Kernel as Eager
from forge_train_plugins.attention._packed import versions
from forge_train_tools.testing import RunForge

pytestmark = [pytest.mark.unit]

BATCH, SEQUENCE, HEADS, HEAD_DIM = 2, 150, 4, 8
FOUND = {one.name: one for one in discover() if "attention_kernel" in Source(one).hooks}
ABLE = {name: Source(one).kernel_capabilities or KernelCapabilities() for name, one in FOUND.items()}
HERE = [name for name, one in FOUND.items() if "cpu" in (Source(one).devices or ("cpu",))]
"""Those that run on a CPU."""
FLAGS = [one.name for one in fields(KernelCapabilities) if one.name != "head_dims"]
DROPPED = DroppedWeights(0.25, torch.tensor([7, -3], dtype=torch.int32), torch.arange(HEADS, dtype=torch.int32))
Asked = dict[str, Any]


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Memory that a kernel forgets to write to is NaN."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def kernel_of(name: str) -> Any:
    return fakes.make(load(FOUND[name])).attention_kernel(fakes.job())


def packed(*lengths: int) -> Tensor:
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


def prefixes(sequence: int, *spans: tuple[int, int]) -> Tensor:
    ends = torch.zeros(sequence, dtype=torch.int64)
    for start, stop in spans:
        ends[start:stop] = stop
    return ends


def variants(flag: str, sequence: int = SEQUENCE) -> list[Asked]:
    """Ways to ask for a capability; `queries` is how many of the last positions ask, all by default."""
    rest = sequence - 8
    several = torch.stack([packed(1, 2, rest, 5), packed(3, rest // 2, 1, 1, rest - rest // 2, 3)])
    some, alone = sequence // 3, {"document_ids": None, "query_document_ids": None}
    after = torch.stack([packed(some - 2, 2) + 3, packed(1, some - 1) + 6])
    ways: dict[str, list[Asked]] = {
        "documents": [
            {"document_ids": several},
            {"document_ids": torch.arange(sequence).expand(BATCH, -1) + 7},
            {"document_ids": torch.zeros(BATCH, sequence, dtype=torch.int64)},
        ],
        "offsets": [{"queries": 1}, {"queries": 5}, {"queries": 5, "offset": 3}, {"queries": 1, "offset": 2}],
        "windows": [{"window": 1}, {"window": 4}, {"window": sequence}, {"window": 2 * sequence}],
        "dropout": [{"dropout": DROPPED}],
        "soft_caps": [{"soft_cap": 0.7}],
        "sinks": [{"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}],
        "log_sum_exp": [{"log_sum_exp": True}],
        "blocks": [
            {"queries": some, "offset": sequence - some // 2, **alone},
            {"queries": some, "offset": 2 * sequence, **alone},
            {"queries": some, "offset": 3, "document_ids": several, "query_document_ids": several[:, 3 : 3 + some]},
            # Of the first row some queries are of the block's last document, of the second row none are.
            {"queries": some, "offset": sequence, "document_ids": several, "query_document_ids": after},
        ],
        "prefixes": [
            {"prefix_ends": torch.zeros(BATCH, sequence, dtype=torch.int64)},
            {"prefix_ends": torch.full((BATCH, sequence), sequence)},
            {
                "prefix_ends": torch.stack(
                    [prefixes(sequence, (0, 70)), prefixes(sequence, (3, rest - 9), (rest, sequence))]
                )
            },
        ],
        "lengths": [{"queries": 1, "lengths": torch.tensor(pair)} for pair in ((1, sequence), (16, sequence // 2))],
    }
    return ways[flag]


def draw(asked: Asked, kv_heads: int, dtype: torch.dtype) -> tuple[list[Tensor], Asked]:
    """Query, key and value, then sinks; and the keywords that are left."""
    asked = dict(asked)
    shapes = [(asked.pop("queries", SEQUENCE), HEADS), *[(SEQUENCE, kv_heads)] * 2]
    given = [torch.randn(BATCH, *shape, HEAD_DIM, dtype=dtype, requires_grad=True) for shape in shapes]
    if "prefix_ends" in asked:
        first = asked.get("offset", SEQUENCE - shapes[0][0])
        asked["prefix_ends"] = asked["prefix_ends"][:, first : first + shapes[0][0]]
    if "sinks" in asked:
        asked["sinks"] = asked["sinks"].to(dtype, copy=True).requires_grad_()
        given.append(asked["sinks"])
    return given, asked


def results(kernel: Any, given: list[Tensor], asked: Asked) -> list[Tensor]:
    """What it gives, and the gradients of all inputs."""
    out = kernel(*given[:3], AttentionOptions(**asked))
    out = out if isinstance(out, tuple) else (out,)
    generator = torch.Generator().manual_seed(1)
    total = sum((one * torch.randn(one.shape, generator=generator)).sum() for one in out)
    return [*out, *torch.autograd.grad(total, given)]  # type: ignore[list-item]


def agree(name: str, asked: Asked, kv_heads: int = 2) -> None:
    """In float64 nothing but the order of sums differs; in float32 nothing but its rounding.

    What a kernel gives as the log-sum-exp is float32 in any case.
    """
    for dtype, tolerance in ((torch.float64, 1e-5 if "log_sum_exp" in asked else 1e-10), (torch.float32, 2e-4)):
        given, keywords = draw(asked, kv_heads, dtype)
        for found, wanted in zip(
            results(kernel_of(name), given, keywords), results(Eager(), given, keywords), strict=True
        ):
            assert found.dtype == wanted.dtype
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def declared(name: str) -> list[str]:
    return [flag for flag in FLAGS if getattr(ABLE[name], flag)]


ALONE = [(name, flag) for name in HERE for flag in declared(name)]
PAIRS = [
    (name, *pair)
    for name in HERE
    for pair in combinations(declared(name), 2)
    if "lengths" not in pair or {"soft_caps", "sinks", "log_sum_exp"} & {*pair}
    if {*pair} != {"blocks", "prefixes"}
]


NEAR = ("documents", "offsets", "windows")
"""What else decides which keys a query sees, and is no block: CI takes prefixes with these."""


def test_the_built_in_kernels_are_among_those_tested() -> None:
    assert {"eager", "flex", "sdpa", "varlen"} <= {*HERE}
    assert {flag for _, flag in ALONE} == {*FLAGS}


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("name", HERE)
def test_plain_attention_and_its_scale(name: str, kv_heads: int) -> None:
    agree(name, {}, kv_heads)
    agree(name, {"scale": 0.5}, kv_heads)


@pytest.mark.parametrize(("name", "flag"), ALONE)
def test_a_declared_capability(name: str, flag: str) -> None:
    for asked in variants(flag):
        for kv_heads in (1, 2, 4):
            agree(name, asked, kv_heads)


@pytest.mark.parametrize(
    ("name", "one", "other"),
    few(PAIRS, [pair for pair in PAIRS if pair[0] != "auto" and ("prefixes" not in pair or {*NEAR} & {*pair})]),
)
def test_two_capabilities_together(name: str, one: str, other: str) -> None:
    for some, more in product(variants(one), variants(other)):
        agree(name, {**some, **more})


@pytest.mark.parametrize("name", [name for name in HERE if ABLE[name].dropout])
def test_dropout_keeps_weights_or_drops_them(name: str) -> None:
    """With one key for each feature the output is the weights."""
    features = 40
    query, key = (torch.randn(BATCH, features, HEADS, features) for _ in range(2))
    value, kernel = torch.eye(features)[None, :, None].expand_as(key), kernel_of(name)
    whole, found = (kernel(query, key, value, AttentionOptions(dropout=one)) for one in (None, DROPPED))
    kept = found != 0
    torch.testing.assert_close(found[kept], (whole / 0.75)[kept], rtol=1e-4, atol=1e-6)
    assert 0.7 < float(kept.sum()) / float((whole != 0).sum()) < 0.8
    for start in (5, 12):  # a block of keys has its own part of the weights
        options = AttentionOptions(offset=20 - start, dropout=DROPPED._replace(start=start))
        block = kernel(query[:, 20:], key[:, start:], value[:, start:], options)
        assert torch.equal(block[..., start:] != 0, kept[:, 20:][..., start:])


@pytest.mark.parametrize("name", [name for name in HERE if ABLE[name].documents])
def test_nothing_comes_from_another_document_or_a_later_token(name: str) -> None:
    (query, key, value), _ = draw({}, 2, torch.float32)
    options = AttentionOptions(document_ids=packed(1, 40, 100, 9).expand(BATCH, -1))
    clean = kernel_of(name)(query, key, value, options)
    seen = torch.zeros(SEQUENCE, dtype=torch.bool)
    seen[41:61] = True  # of queries 41 to 60
    unseen = (~seen)[:, None, None]
    key, value = (key.detach() + 30 * unseen).requires_grad_(), (value.detach() + 1e15 * unseen).requires_grad_()
    out = kernel_of(name)(query, key, value, options)[:, 41:61]
    torch.testing.assert_close(out, clean[:, 41:61])
    for grad in torch.autograd.grad(out.sum(), (key, value)):
        assert not grad[:, ~seen].any()
        assert grad[:, seen].any()


@pytest.mark.parametrize("name", HERE)
def test_bf16_is_no_farther_from_the_truth_than_torch(name: str) -> None:
    asked = variants("documents")[0] if ABLE[name].documents else {}
    given, _ = draw(asked, 2, torch.bfloat16)
    truth = results(Eager(), [one.detach().double().requires_grad_() for one in given], asked)
    torch_own = results(kernel_of("sdpa"), given, asked)
    for found, by_torch, wanted in zip(results(kernel_of(name), given, asked), torch_own, truth, strict=True):
        assert (found - wanted).norm() <= 2 * (by_torch - wanted).norm()


@pytest.mark.parametrize("name", [name for name in HERE if declared(name) != FLAGS])
def test_refuses_options_that_it_does_not_declare(name: str) -> None:
    for flag in {*FLAGS} - {*declared(name)}:
        for way in variants(flag):
            given, asked = draw(way, 2, torch.float32)
            with pytest.raises(ConfigError, match=f"options that its kernel does not support: .*{flag}"):
                kernel_of(name)(*given[:3], AttentionOptions(**asked))


class Asking(Plugin):
    """Asks the kernel for what a test says."""

    api = (1, 0)
    asked = KernelCapabilities()

    @hookimpl
    def kernel_needs(self) -> KernelCapabilities:
        return self.asked


@pytest.mark.parametrize(
    ("name", "flag"), [(name, flag) for name in FOUND for flag in FLAGS if not getattr(ABLE[name], flag)]
)
def test_what_is_not_declared_is_refused_with_the_kernels_that_can(
    name: str, flag: str, run_forge: RunForge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "installed", lambda: ("2",))
    monkeypatch.setattr(Asking, "asked", replace(KernelCapabilities(), **{flag: True}))
    (phrase,) = ABLE[name].lacks(Asking.asked)
    others = ", ".join(other for other in sorted(FOUND) if getattr(ABLE[other], flag))
    with pytest.raises(ConfigError) as error:
        run_forge([load(FOUND[name]), Asking], {"text.isolate": False})
    assert f"computes attention without {phrase}. Plugin 'asking' asks for it." in str(error.value)
    assert str(error.value).endswith(f"Installed kernels that have it: {others}; enable one with --plugins.")
