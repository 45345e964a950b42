"""Context parallelism before there are ranks: what it refuses, what it chooses, what it asks of a kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from forge_train import ConfigError
from forge_train.mesh.layout import Layout
from forge_train_kit.capabilities import KernelCapabilities
from forge_train_plugins.parallel._cp.apply import Heads, check_recurrence, choose, most_ranks, wrap
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve

pytestmark = [pytest.mark.unit]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["train.sequence=30"], r"train.sequence: 30 tokens are no multiple of 2 × parallel.cp = 8: .*; 24 are"),
        (
            ["cp.method=ring"],
            r"sdpa.* without the log-sum-exp and keys in blocks.*cp.* kernels that have it: auto, eager, flex",
        ),
        (["cp.ulysses=2"], r"cp.ulysses: has no effect with cp.method = 'auto'"),
        (["cp.method=ulysses_ring", "cp.ulysses=3"], r"cp.ulysses: 3 is no divisor of parallel.cp = 4"),
        (
            ["plugins=moe", "moe.router=expert_choice", "moe.balance=0"],
            r"moe.router: .*compares all tokens of a micro-batch, but with parallel.cp = 4 a rank has only a slice",
        ),
        (["plugins=statistics", "statistics.attention_logits=true"], r"statistics.attention_logits: looks at whole"),
    ],
    ids=lambda one: one[-1] if isinstance(one, list) else "",
)
def test_is_refused_in_one_sentence(settings: list[str], says: str) -> None:
    plugins = [one.partition("=")[2] for one in settings if one.startswith("plugins=")]
    sets = [one for one in settings if not one.startswith("plugins=")]
    given = ("parallel.cp=4", "train.steps=1", f"text.path={__file__}", "train.sequence=32", *sets)
    with pytest.raises(ConfigError, match=says):
        resolve(Request(plugins=("cp", *plugins), set=given), world=4)


class Kernel(nn.Module):
    """An attention module with its kernel, and heads if it declares them."""

    def __init__(self, heads: int = 0, kv_heads: int = 0) -> None:
        super().__init__()
        self.kernel = lambda query, key, value: query
        if heads:
            self.heads, self.kv_heads, self.head_dim = heads, kv_heads, 8


def part(**units: nn.Module) -> nn.Module:
    whole = nn.Module()
    for name, unit in units.items():
        whole.add_module(name, unit)
    whole.units = tuple(units)
    return whole


def job(cp: int, sequence: int = 4096, *, blocks: bool = False, tp: int = 1) -> Any:
    kernel = SimpleNamespace(cls=SimpleNamespace(kernel_capabilities=KernelCapabilities(blocks=blocks)))
    return SimpleNamespace(
        dist=SimpleNamespace(layout=Layout(cp=cp, tp=tp)),
        hooks=SimpleNamespace(provider=lambda slot: "kernel", enabled={"kernel": kernel}),
        config=SimpleNamespace(train=SimpleNamespace(sequence=sequence)),
    )


def test_a_unit_without_a_kernel_is_named() -> None:
    mixed = part(one=nn.Sequential(Kernel()), two=nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"parallel.cp = 2: two \(Linear\) shows no attention kernel"):
        wrap(mixed, job(2), "gather")


@pytest.mark.parametrize(("heads", "kv_heads", "tp"), [(6, 6, 1), (8, 2, 1), (8, 4, 2)])
def test_a_recurrence_whose_heads_can_not_be_shared_out_is_refused(heads: int, kv_heads: int, tp: int) -> None:
    class Recurrent(nn.Module):
        def recurrence(self) -> None: ...

    unit = Recurrent()
    unit.heads, unit.kv_heads = heads, kv_heads  # type: ignore[assignment]
    says = rf"divide the {heads // tp} value heads and {kv_heads // tp} key heads of unit \(Recurrent\)"
    with pytest.raises(ConfigError, match=says):
        check_recurrence("unit", unit, 4, tp)


@pytest.mark.parametrize(
    ("tp", "says"), [(1, r"4 ranks can't share out query heads \(6\)"), (2, r"out query heads \(3\)")]
)
def test_heads_that_can_not_be_shared_out_are_refused_with_what_works(tp: int, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"{says}.* of unit\. These can: 'gather', 'ring'"):
        wrap(part(unit=Kernel(6, 2)), job(4, tp=tp), "ulysses")
    with pytest.raises(ConfigError, match=r"'ulysses_ring' with cp\.ulysses = 2\."):
        wrap(part(unit=Kernel(6, 2)), job(4), "ulysses")


@pytest.mark.parametrize(
    ("heads", "cp", "sequence", "blocks", "takes"),
    [
        (Heads(8, 8, 64), 4, 4096, False, ("ulysses", 0)),  # (8 + 8) / 4 is less than 8
        (Heads(32, 8, 128), 2, 4096, False, ("gather", 0)),  # (32 + 8) / 2 is not
        (Heads(32, 8, 128), 8, 4096, False, ("ulysses", 0)),
        (Heads(6, 6, 64), 4, 4096, True, ("gather", 0)),
        (Heads(6, 6, 64), 4, 65_536, True, ("ulysses_ring", 2)),
        (Heads(7, 7, 64), 4, 65_536, True, ("ring", 0)),
        (Heads(7, 7, 64), 4, 65_536, False, ("gather", 0)),
        (Heads(32, 8, 128), 2, 65_536, False, ("ulysses", 0)),
        (None, 4, 4096, False, ("gather", 0)),
        (None, 4, 65_536, True, ("ring", 0)),
    ],
)
def test_auto_goes_by_heads_and_length(heads: Any, cp: int, sequence: int, blocks: bool, takes: Any) -> None:
    known = [heads] if heads else []
    assert choose(known, bool(heads), cp, job(cp, sequence, blocks=blocks)) == takes


def test_the_most_ranks_that_share_heads_out_are_fewer_than_all() -> None:
    assert most_ranks([Heads(8, 8, 4)], 8) == 4
    assert most_ranks([Heads(6, 2, 4)], 6) == 2
    assert most_ranks([Heads(5, 5, 4)], 4) == 1
