"""Every operation of a state map: there and back, in one piece and in any range, and what is refused."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from forge_train import ConfigError
from forge_train_kit.state_map import (
    Box,
    Cast,
    Concat,
    Dequantise,
    DequantiseMXFP4,
    Drop,
    Flatten,
    Rename,
    Renumber,
    Repeat,
    Resize,
    Rotary,
    Split,
    Stack,
    StateMap,
    Together,
    Transpose,
    Unread,
    Unstack,
)
from forge_train_kit.state_map.strided import EveryNth

pytestmark = [pytest.mark.unit]

Tensors = dict[str, Tensor]
EACH = "model.{i}.experts.{e}.up"
QKV = ("model.{i}.q.{kind}", "model.{i}.k.{kind}", "model.{i}.v.{kind}")


class Folder:
    """Stored tensors, of which ranges are read; it knows how many bytes were."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors, self.bytes = tensors, 0

    def described(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self.tensors.items()}

    def fetch(self, name: str, box: Box) -> Tensor:
        part = self.tensors[name][tuple(slice(*bounds) for bounds in box)].clone()
        self.bytes += part.numel() * part.element_size()
        return part

    @property
    def held(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def mapped(rule: StateMap, tensors: Mapping[str, Tensor]) -> Tensors:
    folder = Folder(tensors)
    return dict(rule.plan(folder.described()).stream(folder.fetch))


# -- one case for every operation -------------------------------------------------------------------------------------


def draw(chance: random.Random, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(chance.randrange(2**31)))
    return drawn.to(dtype)


def sizes(chance: random.Random, dims: int) -> list[int]:
    return [chance.randint(1, 5) for _ in range(dims)]


Case = tuple[StateMap, Tensors, Tensors]
"""A map, tensors, and what becomes of them by torch's own functions."""


def rename(chance: random.Random) -> Case:
    given = {f"a.{i}.{kind}": draw(chance, *sizes(chance, 2)) for i in range(3) for kind in ("weight", "bias")}
    given["top"] = draw(chance)
    rule = Rename({"a.{i}.{kind}": "b.{kind}.of.{i}", "top": "head.top"})
    names = {"top": "head.top"} | {f"a.{i}.{k}": f"b.{k}.of.{i}" for i in range(3) for k in ("weight", "bias")}
    return rule, given, {names[name]: tensor for name, tensor in given.items()}


def stack(chance: random.Random) -> Case:
    shape, count = sizes(chance, chance.randint(0, 3)), chance.randint(1, 12)
    given = {f"model.{i}.experts.{e}.up": draw(chance, *shape) for e in range(count) for i in range(2)}
    rows = {i: [given[f"model.{i}.experts.{e}.up"] for e in range(count)] for i in range(2)}
    return Stack(EACH, "{i}.up"), given, {f"{i}.up": torch.stack(rows[i]) for i in range(2)}


def unstack(chance: random.Random) -> Case:
    rule, given, expected = stack(chance)
    assert isinstance(rule, Stack)
    return Unstack(rule.whole, rule.each), expected, given


def concat(chance: random.Random) -> Case:
    shares, groups, unit = tuple(sizes(chance, 3)), chance.randint(1, 3), chance.randint(1, 3)
    given, expected = {}, {}
    dim = chance.randint(0, 1)
    for kind, beside in (("weight", (4,)), ("wide", (2, 3))):
        parts = [draw(chance, groups, share * unit, *beside) for share in shares]
        whole = torch.cat(parts, 1).flatten(0, 1)
        for letter, part in zip("qkv", parts, strict=True):
            given[f"model.0.{letter}.{kind}"] = _turned(part.flatten(0, 1), dim)
        expected[f"0.qkv.{kind}"] = _turned(whole, dim)
    return Concat(QKV, "{i}.qkv.{kind}", dim, shares, groups), given, expected


def _turned(tensor: Tensor, dim: int) -> Tensor:
    return tensor.movedim(0, dim).contiguous()


def split(chance: random.Random) -> Case:
    rule, given, expected = concat(chance)
    assert isinstance(rule, Concat)
    return Split(rule.whole, rule.parts, rule.dim, rule.shares, rule.groups), expected, given


def in_turn(chance: random.Random) -> Case:
    dim, length = chance.randint(0, 2), chance.randint(1, 7)
    shape = sizes(chance, 3)
    shape[dim] = length
    parts = {f"model.0.{letter}.w": draw(chance, *shape) for letter in "qkv"}
    whole = torch.stack([*parts.values()], dim + 1).flatten(dim, dim + 1)
    return Concat(QKV, "{i}.qkv.{kind}", dim, groups=0), parts, {"0.qkv.w": whole}


def turns_apart(chance: random.Random) -> Case:
    rule, given, expected = in_turn(chance)
    assert isinstance(rule, Concat)
    return Split(rule.whole, rule.parts, rule.dim, groups=0), expected, given


def transpose(chance: random.Random) -> Case:
    given = {f"h.{i}.c": draw(chance, *sizes(chance, 3)) for i in range(2)}
    one, other = chance.choice([(0, 1), (1, 2), (0, 2)])
    return Transpose(("h.{i}.c",), (one, other)), given, {n: t.transpose(one, other) for n, t in given.items()}


def flatten(chance: random.Random) -> Case:
    last = tuple(sizes(chance, chance.randint(1, 3)))
    given = {"a": draw(chance, 3, *last), "b": draw(chance, 2, 2, *last), "c": draw(chance, *last)}
    flat = {name: tensor.flatten(-len(last)) for name, tensor in given.items()}
    rule = Flatten(("a", "b", "c"), last)
    return (rule, given, flat) if chance.random() < 0.5 else (rule.inverse(), flat, given)


def rotary(chance: random.Random) -> Case:
    heads, half, kept = chance.randint(1, 3), chance.randint(1, 4), chance.choice([0, 2])
    head_dim = 2 * half + kept
    given = {"q.weight": draw(chance, heads * head_dim, 3), "q.bias": draw(chance, heads * head_dim)}
    rule = Rotary(("q.{kind}",), head_dim, turned=2 * half)

    def there(tensor: Tensor) -> Tensor:
        each = tensor.unflatten(0, (heads, head_dim))
        pairs = each[:, : 2 * half].unflatten(1, (half, 2)).transpose(1, 2).flatten(1, 2)
        return torch.cat([pairs, each[:, 2 * half :]], 1).flatten(0, 1)

    expected = {name: there(tensor) for name, tensor in given.items()}
    return (rule, given, expected) if chance.random() < 0.5 else (rule.inverse(), expected, given)


def pad(chance: random.Random) -> Case:
    rows, more = chance.randint(1, 6), chance.randint(0, 4)
    given = {"embedding": draw(chance, rows, 3), "head": draw(chance, rows, 3)}
    new = {name: torch.cat([tensor, torch.full((more, 3), 0.5)]) for name, tensor in given.items()}
    return Resize(("embedding", "head"), rows, rows + more, fill=0.5), given, new


def cast(chance: random.Random) -> Case:
    given = {f"{i}.w": draw(chance, *sizes(chance, 2), dtype=torch.bfloat16) for i in range(3)}
    return Cast(("{all*}",), torch.bfloat16, torch.float32), given, {name: t.float() for name, t in given.items()}


def renumber(chance: random.Random) -> Case:
    order = chance.sample(range(4), 4)
    given = {f"h.{i}.{kind}": draw(chance, *sizes(chance, 2)) for i in range(4) for kind in ("w", "mlp.b")}
    expected = {f"h.{new}.{kind}": given[f"h.{old}.{kind}"] for new, old in enumerate(order) for kind in ("w", "mlp.b")}
    return Renumber("h.{i}.{rest*}", tuple(order)), given, expected


def repeat(chance: random.Random) -> Case:
    count = chance.randint(1, 4)
    given = {f"{i}.up": draw(chance, *sizes(chance, 2)) for i in range(2)}
    rule = Repeat("{i}.up", "{i}.experts.up", count)
    return rule, given, {f"{i}.experts.up": torch.stack([given[f"{i}.up"]] * count) for i in range(2)}


def pad_with_the_mean(chance: random.Random) -> Case:
    rows, more = chance.randint(1, 6), chance.randint(1, 4)
    given = {"embedding": draw(chance, rows, 3)}
    mean = given["embedding"].mean(0, keepdim=True).expand(more, 3)
    expected = {"embedding": torch.cat([given["embedding"], mean])}
    return Resize(("embedding",), rows, rows + more, fill="mean"), given, expected


def family(chance: random.Random) -> Case:
    """Stacked experts with fused gate and up, stored transposed; renamed attention."""
    dim, hidden, experts = sizes(chance, 3)
    fused = {f"m.{e}.gate_up": draw(chance, dim, 2 * hidden) for e in range(experts)}
    given = {**fused, "m.q.weight": draw(chance, dim, dim)}
    rule = Transpose(("m.{e}.gate_up",)) >> (
        (Stack("m.{e}.gate_up", "m.gate_up") >> Split("m.gate_up", ("gate", "up"), dim=1))
        | Rename({"m.q.weight": "attention.q"})
    )
    whole = torch.stack([tensor.t() for tensor in fused.values()])
    gate, up = whole.chunk(2, 1)
    return rule, given, {"gate": gate, "up": up, "attention.q": given["m.q.weight"]}


def dequantise(chance: random.Random) -> Case:
    rows, columns = chance.randint(1, 300), chance.randint(1, 300)
    weight = draw(chance, rows, columns, dtype=torch.float8_e4m3fn)
    scale = draw(chance, math.ceil(rows / 128), math.ceil(columns / 128)).abs()
    expected = weight.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    norm = draw(chance, 4)
    given = {"q.weight": weight, "q.weight_scale_inv": scale, "norm.weight": norm}
    rule = Dequantise("{m}.weight", "{m}.weight_scale_inv", torch.float32) >> Rename({"{m}.weight": "{m}.weight"})
    return rule, given, {"q.weight": expected, "norm.weight": norm}


def dequantise_mxfp4(chance: random.Random) -> Case:
    outer, blocks = sizes(chance, 2), chance.randint(1, 4)
    bytes_ = torch.tensor([chance.randrange(256) for _ in range(math.prod(outer) * blocks * 16)], dtype=torch.uint8)
    powers = torch.tensor([chance.randint(115, 135) for _ in range(math.prod(outer) * blocks)], dtype=torch.uint8)
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
    values = [table[half] for byte in bytes_.tolist() for half in (byte % 16, byte // 16)]
    by = [2.0 ** (power - 127) for power in powers.tolist() for _ in range(32)]
    expected = torch.tensor([v * f for v, f in zip(values, by, strict=True)], dtype=torch.bfloat16)
    given = {"e_blocks": bytes_.view(*outer, blocks, 16), "e_scales": powers.view(*outer, blocks)}
    rule = DequantiseMXFP4("{m}_blocks", "{m}_scales", "{m}", torch.bfloat16)
    return rule, given, {"e": expected.view(*outer, blocks * 32)}


INVERTIBLE = [
    *(rename, stack, unstack, concat, split, in_turn, turns_apart),
    *(transpose, flatten, rotary, pad, cast, renumber, family),
]
ALL = [*INVERTIBLE, dequantise, dequantise_mxfp4, repeat, pad_with_the_mean]
seeds = st.integers(0, 2**31)
often = settings(max_examples=40, deadline=None)


def same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("case", ALL)
@given(seed=seeds)
@often
def test_streamed_is_what_torch_makes_of_all_tensors_at_once(case: Callable[..., Case], seed: int) -> None:
    rule, given, expected = case(random.Random(seed))
    same(mapped(rule, given), expected)


@pytest.mark.parametrize("case", INVERTIBLE)
@given(seed=seeds)
@often
def test_there_and_back_is_the_identity(case: Callable[..., Case], seed: int) -> None:
    rule, given, expected = case(random.Random(seed))
    same(mapped(rule.inverse(), expected), given)
    same(mapped(rule.inverse().inverse(), given), expected)
    same(mapped(rule >> rule.inverse(), given), given)


@pytest.mark.parametrize("case", ALL)
@given(seed=seeds)
@often
def test_a_range_is_that_range_of_the_whole(case: Callable[..., Case], seed: int) -> None:
    chance = random.Random(seed)
    rule, given, expected = case(chance)
    folder = Folder(given)
    plan = rule.plan(folder.described())
    for name, tensor in expected.items():
        box = tuple(tuple(sorted((chance.randint(0, size), chance.randint(0, size)))) for size in tensor.shape)
        part = plan.read(name, folder.fetch, box)  # type: ignore[arg-type]
        assert torch.equal(part, tensor[tuple(slice(*bounds) for bounds in box)])
        into = torch.empty(part.shape, dtype=tensor.dtype)
        plan.read_into(into, name, folder.fetch, box)  # type: ignore[arg-type]
        assert torch.equal(into, part)


EXACT = [one for one in INVERTIBLE if one not in (flatten, rotary, turns_apart)]


@pytest.mark.parametrize("case", EXACT)
@given(seed=seeds)
@often
def test_ranges_that_cover_everything_read_each_byte_once(case: Callable[..., Case], seed: int) -> None:
    chance = random.Random(seed)
    rule, given, expected = case(chance)
    folder = Folder(given)
    plan = rule.plan(folder.described())
    # As `turns_apart`, which a split with groups of one entry each is too: what lies between is read.
    assume(not any(isinstance(view, EveryNth) for view in plan.targets.values()))
    for name, tensor in expected.items():
        edges = [sorted({0, size, chance.randint(0, size)}) for size in tensor.shape]
        for box in boxes(edges):
            plan.read(name, folder.fetch, box)
    assert folder.bytes == folder.held


def boxes(edges: list[list[int]]) -> Iterator[Box]:
    if not edges:
        yield ()
        return
    for low, high in zip(edges[0], edges[0][1:], strict=False):
        yield from (((low, high), *rest) for rest in boxes(edges[1:]))


def test_rotary_reads_whole_heads_only() -> None:
    folder = Folder({"q": torch.randn(32, 4)})
    plan = Rotary(("q",), 8).plan(folder.described())
    plan.read("q", folder.fetch, ((9, 15), (1, 2)))
    assert folder.bytes == 8 * 1 * 4


def test_dequantised_ranges_read_their_values_and_the_scales_of_their_blocks() -> None:
    scale = torch.rand(4, 4)
    folder = Folder({"w": torch.randn(512, 512).to(torch.float8_e4m3fn), "s": scale})
    plan = Dequantise("w", "s", torch.bfloat16).plan(folder.described())
    part = plan.read("w", folder.fetch, ((120, 140), (0, 10)))
    assert folder.bytes == 20 * 10 + 2 * 1 * 4
    assert part.dtype == torch.bfloat16


# -- groups -----------------------------------------------------------------------------------------------------------


def test_groups_are_what_depends_on_each_other() -> None:
    names = [f"m.{i}.{letter}" for i in range(2) for letter in ("qkv", "gate", "up")] + ["norm"]
    tensors = dict.fromkeys(names, ((6, 2), torch.float32))
    rule = (
        Split("m.{i}.qkv", ("{i}.q", "{i}.k", "{i}.v"))
        | Concat(("m.{i}.gate", "m.{i}.up"), "{i}.gate_up")
        | Rename({"norm": "last"})
    )
    assert [(one.sources, one.targets) for one in rule.plan(tensors).groups] == [
        (("m.0.qkv",), ("0.q", "0.k", "0.v")),
        (("m.1.qkv",), ("1.q", "1.k", "1.v")),
        (("m.0.gate", "m.0.up"), ("0.gate_up",)),
        (("m.1.gate", "m.1.up"), ("1.gate_up",)),
        (("norm",), ("last",)),
    ]


# -- what is refused, before anything is read ----------------------------------------------------------------------

F32 = torch.float32
FLAT, SQUARE = ((4,), F32), ((4, 4), F32)
REFUSED: dict[str, tuple[StateMap, dict[str, Any], str]] = {
    "a missing source": (Rename({"a": "b"}), {}, "a: missing"),
    "a missing part": (Concat(("q", "k"), "qk"), {"q": FLAT}, "k: missing"),
    "a missing part of a layer": (
        Concat(("{i}.q", "{i}.k"), "{i}.qk"),
        {"0.q": FLAT, "0.k": FLAT, "1.k": FLAT},
        "1.q: missing, although 1.k exists",
    ),
    "a missing expert": (Stack("{e}.up", "up"), {"0.up": FLAT, "2.up": FLAT}, "1.up: missing"),
    "an expert without a number": (Stack("{e}.up", "up"), {"0.up": FLAT, "x.up": FLAT}, "x.up: up has 2 parts"),
    "a number as large as may be": (Stack("{e}.up", "up"), {f"{'9' * 99}.up": FLAT}, "0.up: missing"),
    "a missing scale": (DequantiseMXFP4("{m}_b", "{m}_s", "{m}", F32), {"e_b": ((1, 16), F32)}, "e_s: missing"),
    "a missing weight": (Dequantise("{m}.w", "{m}.s", F32), {"e.s": SQUARE}, "e.w: missing"),
    "a tensor that is left over": (Rename({"a": "b"}), {"a": FLAT, "c": FLAT}, "c: nothing takes it"),
    "left over after all steps": (
        Rename({"a": "b"}) >> Rename({"b": "c"}),
        {"a": FLAT, "x": FLAT},
        "x: nothing takes it",
    ),
    "a source for two": (Rename({"a": "b"}) | Rename({"a": "c"}), {"a": FLAT}, "a: taken twice"),
    "a target of two": (Rename({"a": "c", "b": "c"}), {"a": FLAT, "b": FLAT}, "c: given twice"),
    "a target that is there": (
        Rename({"a": "b"}) >> Rename({"b": "c"}),
        {"a": FLAT, "b": FLAT},
        "b: given, but it exists already",
    ),
    "experts of several shapes": (Stack("{e}.up", "up"), {"0.up": FLAT, "1.up": SQUARE}, "up: its parts differ"),
    "parts of several dtypes": (
        Concat(("q", "k"), "qk"),
        {"q": FLAT, "k": ((4,), torch.float16)},
        "qk: its parts differ: torch.float16 and torch.float32",
    ),
    "parts out of proportion": (
        Concat(("q", "k"), "qk", shares=(2, 1)),
        {"q": FLAT, "k": FLAT},
        "qk: parts of 4 and 4 are not in the proportion 2 : 1",
    ),
    "a whole that does not part": (Split("qk", ("q", "k", "v")), {"qk": FLAT}, "qk: 4 can't be split 1 : 1 : 1"),
    "no such dimension": (Split("qk", ("q", "k"), dim=1), {"qk": FLAT}, "qk: there is no dimension 1 in [4]"),
    "a dimension from the end": (Concat(("q",), "qk", dim=-1), {"q": FLAT}, "qk: there is no dimension -1"),
    "a single number as a stack": (Unstack("up", "{e}.up"), {"up": ((), F32)}, "up: there is no dimension 0"),
    "a vector to transpose": (Transpose(("a",)), {"a": FLAT}, "a: there is no dimension 1"),
    "other dimensions to flatten": (Flatten(("a",), (4, 2)), {"a": SQUARE}, "a: [4, 4] does not end with [4, 2]"),
    "another length to unflatten": (Flatten(("a",), (2, 3)).inverse(), {"a": FLAT}, "a: [4] does not end with 6"),
    "half a head": (Rotary(("q",), 8), {"q": FLAT}, "q: 4 features are not a multiple of head_dim = 8"),
    "another vocabulary": (Resize(("e",), 5, 8), {"e": FLAT}, "e: expected 5 rows, found 4"),
    "another dtype": (Cast(("a",), torch.bfloat16, F32), {"a": FLAT}, "a: expected torch.bfloat16, found torch.f"),
    "scales of other blocks": (
        Dequantise("{m}.w", "{m}.s", F32),
        {"e.w": ((256, 256), F32), "e.s": SQUARE},
        "e.s: [4, 4] don't fit the blocks of [256, 256]",
    ),
    "exponents of other blocks": (
        DequantiseMXFP4("{m}_b", "{m}_s", "{m}", F32),
        {"e_b": ((2, 16), F32), "e_s": FLAT},
        "e_s: [4] don't fit the blocks of [2, 16]",
    ),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_what_does_not_fit_is_refused_by_name_before_a_byte_is_read(mistake: str) -> None:
    rule, tensors, told = REFUSED[mistake]
    with pytest.raises(ConfigError) as caught:
        rule.plan(tensors)
    assert f"\n  {told}" in str(caught.value)


@given(seed=seeds, case=st.sampled_from([one for one in ALL if one is not dequantise]))
@often
def test_without_any_one_tensor_or_with_one_more_it_is_refused(seed: int, case: Callable[..., Case]) -> None:
    chance = random.Random(seed)
    rule, given, expected = case(chance)
    described = Folder(given).described()
    if case is not cast:  # which takes everything
        with pytest.raises(ConfigError, match="of no form: nothing takes it"):
            rule.plan(described | {"of no form": FLAT})
    gone = chance.choice(sorted(given))
    try:
        targets = rule.plan({name: one for name, one in described.items() if name != gone}).targets
    except ConfigError:
        return
    assert targets.keys() < expected.keys() or any(targets[n].shape != t.shape for n, t in expected.items())


MISMADE: dict[str, tuple[Callable[[], object], str]] = {
    "placeholders that differ": (lambda: Rename({"a.{i}": "b.{j}"}), "have different placeholders"),
    "nothing to stack over": (lambda: Stack("a.{i}", "b.{i}"), "must have one placeholder more"),
    "two to stack over": (lambda: Unstack("b", "a.{i}.{e}"), "must have one placeholder more"),
    "shares of other parts": (lambda: Split("a", ("b", "c"), shares=(1, 2, 3)), r"expected 2 shares"),
    "parts of other layers": (lambda: Concat(("{i}.q", "k"), "{i}.qk"), "have different placeholders"),
    "odd features": (lambda: Rotary(("q",), 7), "7 of 7 features can't be paired"),
    "quantised": (lambda: Dequantise("w", "s", F32).inverse(), "Dequantise has no inverse"),
    "quantised in a chain": (
        lambda: (DequantiseMXFP4("b", "s", "w", F32) >> Rename({"w": "x"})).inverse(),
        "DequantiseMXFP4 has no inverse",
    ),
    "two into one": (lambda: Rename({"a": "c", "b": "c"}).inverse(), "has no inverse"),
}


@pytest.mark.parametrize("mistake", MISMADE)
def test_a_map_that_can_not_be_is_refused_when_it_is_made(mistake: str) -> None:
    make, told = MISMADE[mistake]
    with pytest.raises(ConfigError, match=told):
        make()


def test_what_is_dropped_is_no_leftover_and_need_not_be_there() -> None:
    rule = Rename({"a": "b"}) | Drop(("{m*}.inv_freq", "seldom"))
    assert [*rule.plan({"a": FLAT, "x.y.inv_freq": FLAT}).targets] == ["b"]
    assert [*rule.inverse().plan({"b": FLAT}).targets] == ["a"]


def test_what_is_not_read_is_given_back_with_one_value() -> None:
    rule = Rename({"a": "b"}) | Unread({"one": 1.0, "zero": 0.0}, like="b")
    assert [*rule.plan({"a": FLAT, "one": FLAT}).targets] == ["b"]
    back = rule.inverse().plan({"b": FLAT})
    found = {name: back.read(name, lambda name, box: torch.full((6,), 7.0)).tolist() for name in back.targets}
    assert {name: set(values) for name, values in found.items()} == {"a": {7.0}, "one": {1.0}, "zero": {0.0}}
    with pytest.raises(ConfigError, match="b: missing"):
        rule.inverse().plan({"c": FLAT})


def test_operators_make_one_flat_map() -> None:
    one, two, three = (Rename({old: new}) for old, new in ("ab", "bc", "cd"))
    assert (one | two | three) == Together((one, two, three))
    assert [*(one >> two >> three).plan({"a": FLAT}).targets] == ["d"]


def test_an_order_of_rotary_features_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown order 'halves'"):
        Rotary(("q",), 4, "halves")  # type: ignore[arg-type]
