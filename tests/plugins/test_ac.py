"""`ac`: what is recomputed, what that frees, and that nothing else changes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import fakes
from forge_train import ConfigError, PluginError, attach_loss
from forge_train.contract.auxiliary import loss_scaling
from forge_train_kit.layers import AttentionOptions
from forge_train_plugins.attention._flex import FlexKernel
from forge_train_plugins.attention._packed.kernel import PackedKernel, TiledKernel
from forge_train_plugins.attention._sdpa import Kernel as SDPAKernel
from forge_train_plugins.memory._ac import Policy, breaks, recompute, recompute_broken
from forge_train_plugins.memory.ac import ActivationCheckpointing
from forge_train_plugins.precision._precision import narrow
from forge_train_tools.testing import RunForge

pytestmark = pytest.mark.unit


class _Live(TorchDispatchMode):
    """Remembers every storage that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def bytes(self) -> int:
        return sum(size for reference, size in self.storages.values() if not reference.expired())


def held_after_forward(save: Sequence[str] | None, every: int = 1) -> int:
    """Bytes that a decoder keeps for its backward pass."""
    part = fakes.decoder(layers=4, dim=64, hidden=256)
    if save is not None:
        policy = Policy.of(save) if save else None
        recompute([part.get_submodule(unit) for unit in part.units[::every]], policy)
    with _Live() as live:
        out = part(torch.zeros(4, 64, dtype=torch.int64))
    held = live.bytes()
    out.sum().backward()
    return held


def test_frees_what_it_recomputes_and_keeps_what_it_is_told() -> None:
    nothing, full, half = held_after_forward(None), held_after_forward(()), held_after_forward((), every=2)
    attention, both = held_after_forward(("attention",)), held_after_forward(("attention", "matmul"))
    some = held_after_forward(("attention", "alternate_matmul"))
    print(f"kept: {nothing} B; full {full}, every second {half}; attention {attention}, +mm/2 {some}, +mm {both}")
    assert full < 0.2 * nothing
    assert full < half < nothing
    assert full < attention < some < both < nothing


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"ac.every": 2},
        {"ac.mode": "selective"},
        {"ac.mode": "selective", "ac.save": ["alternate_matmul", "aten.silu.default"]},
        {"ac.mode": "none"},
    ],
)
def test_changes_no_number_and_no_name(run_forge: RunForge, config: dict[str, Any]) -> None:
    plain, run = run_forge(), run_forge(["ac"], config)
    assert run.numbers == plain.numbers
    assert list(run.model.state_dict()) == list(plain.model.state_dict())
    assert all(
        torch.equal(ours, theirs)
        for ours, theirs in zip(*(one.model.parameters() for one in (run, plain)), strict=True)
    )


def test_units_stay_what_they_were() -> None:
    part = fakes.decoder()
    before = {name: type(module).__name__ for name, module in part.named_modules()}
    kind = type(part.layers["0"])
    recompute(part.layers.values(), None)
    assert {name: type(module).__name__ for name, module in part.named_modules()} == before
    assert isinstance(part.layers["0"], kind)
    assert type(part.layers["0"]) is type(part.layers["1"]), "torch.compile must find them alike"


class Noisy(nn.Module):
    """Draws a mask, and adds a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = nn.functional.dropout(x * self.weight, 0.5)
        return attach_loss(x, (x**2).sum())


@pytest.mark.parametrize("save", [None, ("aten.mul.Tensor",)])
def test_random_numbers_and_attached_losses_are_as_without(save: Sequence[str] | None) -> None:
    gradients = []
    for recomputes in (False, True):
        unit = Noisy()
        if recomputes:
            recompute([unit], Policy.of(save) if save else None)
        torch.manual_seed(0)
        with loss_scaling(0.5):
            unit(torch.arange(8.0)).sum().backward()
        assert unit.calls == 1 + recomputes
        gradients.append(unit.weight.grad)
    assert torch.equal(*gradients)


def test_evaluation_computes_once() -> None:
    unit = Noisy()
    recompute([unit], None)
    with torch.no_grad():
        unit(torch.ones(8))
    assert unit.calls == 1


def test_a_forward_of_its_own_is_refused() -> None:
    unit = Noisy()
    unit.forward = unit.forward  # type: ignore[method-assign]
    with pytest.raises(PluginError, match="has replaced the forward of one Noisy"):
        recompute([unit], None)


def test_says_what_was_to_be_kept_and_never_came(caplog: pytest.LogCaptureFixture) -> None:
    unit, policy = Noisy(), Policy.of(("matmul", "aten.mul.Tensor"))
    recompute([unit], policy)
    unit(torch.ones(8)).sum().backward()
    with caplog.at_level(logging.WARNING, "forge_train"):
        policy.report()
        policy.report()
    assert [record.getMessage() for record in caplog.records] == [
        "ac.save: no unit computed anything of the kind matmul."
    ]


@pytest.mark.parametrize(
    ("save", "says"),
    [
        (("matmull",), "'matmull' is neither one of attention, matmul, collectives, alternate_matmul nor the name of"),
        (("matmul", "alternate_matmul"), "name one of them"),
    ],
)
def test_a_wrong_name_is_refused(save: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Policy.of(save)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"save": ("attention",)}, "ac.save"),
        ({"budget": 0.1}, "ac.budget"),
        ({"mode": "none", "every": 2}, "ac.every"),
        ({"mode": "selective", "save": ()}, "ac.save"),
    ],
)
def test_an_option_without_effect_is_an_error(config: dict[str, Any], key: str) -> None:
    problems = list(fakes.make(ActivationCheckpointing, **config).check_config(fakes.run_config()))
    assert [problem.key for problem in problems] == [key]


def test_a_budget_needs_the_compiler(run_forge: RunForge) -> None:
    with pytest.raises(ConfigError, match="requires the slot 'compile'"):
        run_forge(["ac"], {"ac.mode": "memory_budget"})


def test_attention_in_tiles_is_right_where_products_are_kept(run_forge: RunForge) -> None:
    """What a product gave must not be changed in place afterwards."""
    plain = run_forge(["flex"], {"train.sequence": 32}, steps=2)
    kept = run_forge(["flex", "ac"], {"train.sequence": 32, "ac.mode": "selective"}, steps=2)
    assert [line["grad_norm"] for line in kept.metrics] == [line["grad_norm"] for line in plain.metrics]


@pytest.mark.parametrize(
    ("kernel", "broken"),
    [
        (PackedKernel(lambda query, key, value, bounds, scale, window: query), True),
        (FlexKernel(lambda query, *more, **asked: query), True),
        (SimpleNamespace(kernels={"varlen": PackedKernel(lambda query, *more: query)}), True),
        (TiledKernel(), True),
        (SDPAKernel(), False),
    ],
    ids=["packed", "flex", "one of several", "tiled", "sdpa"],
)
def test_a_kernel_that_leaves_a_function_uncompiled_breaks_its_unit(kernel: Any, broken: bool) -> None:
    unit = nn.Module()
    unit.kernel = kernel
    assert breaks(unit) is broken


@pytest.mark.parametrize(("save", "casts"), [((), 2), (("matmul",), 2), (("aten._to_copy.default",), 1)])
def test_narrow_weights_are_cast_again_unless_they_are_kept(save: tuple[str, ...], casts: int) -> None:
    class Seen(TorchDispatchMode):
        casts = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default:
                Seen.casts += (out.shape, out.dtype) == ((24, 16), torch.bfloat16)
            return out

    unit = nn.Linear(16, 24)
    narrow(unit, torch.bfloat16, torch.float32)
    recompute([unit], Policy.of(save) if save else None)
    x = torch.randn(4, 16, dtype=torch.bfloat16, requires_grad=True)
    with Seen():
        unit(x).square().sum().backward()
    assert Seen.casts == casts


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_units_with_packed_documents_are_compiled_around_their_kernel(mode: str) -> None:
    """torch drops a recomputed region as a whole, if something in it asks to be left alone."""

    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.kernel = PackedKernel(lambda query, key, value, *more: query + key.mean() + value.mean())

        def forward(self, x: Tensor, document_ids: Tensor) -> Tensor:
            hidden = torch.unflatten(self.a(x), -1, (2, 4))
            out: Tensor = self.b(
                self.kernel(hidden, hidden, hidden, AttentionOptions(document_ids=document_ids)).flatten(2)
            )
            return x + out

    torch.compiler.reset()
    counters.clear()
    unit = Unit()
    recompute_broken([unit], None if mode == "full" else Policy.of(["matmul"]))
    unit.compile(backend="eager")
    x = torch.randn(2, 6, 8, requires_grad=True)
    unit(x, torch.tensor([[0, 0, 1, 1, 1, 1]] * 2)).sum().backward()
    assert counters["stats"]["unique_graphs"] > 0
    assert x.grad is not None
