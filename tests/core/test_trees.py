"""Trees of tensors are cut into parts and joined again, each the inverse of the other."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forge_train import (
    Axes,
    Batch,
    PluginError,
    Replicate,
    Spec,
    Split,
    Stack,
    shard_of_tree,
    shard_tree,
    unshard_tree,
)
from forge_train_tools.testing.bench import same

pytestmark = [pytest.mark.unit, pytest.mark.accept("axes", 1)]


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass(frozen=True)
class Record:
    kept: Any
    cut: Any


DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


def tensor(chance: random.Random, shape: Sequence[int]) -> Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(chance.randrange(2**31)))
    return (drawn * 10).to(chance.choice(DTYPES))


def spans(chance: random.Random, length: int, parts: int) -> list[list[tuple[int, int]]]:
    """All entries, in pieces that are dealt out."""
    edges = sorted({0, length, *(chance.randint(0, length) for _ in range(2 * parts))})
    dealt: list[list[tuple[int, int]]] = [[] for _ in range(parts)]
    pieces = list(itertools.pairwise(edges))
    chance.shuffle(pieces)
    for piece in pieces:
        dealt[chance.randrange(parts)].append(piece)
    return dealt


def leaf(chance: random.Random, parts: int) -> tuple[Any, Spec]:
    """A tensor or another value, and how it is cut."""
    shape = [chance.randint(1, 3) for _ in range(chance.randint(1, 3))]
    dim = chance.randrange(-len(shape), len(shape))
    kind = chance.choice(("even", "sizes", "spans", "stack", "same", "value", "none"))
    if kind == "even":
        shape[dim] = parts * chance.randint(0, 3)
        return tensor(chance, shape), Split(dim)
    if kind == "sizes":
        sizes = [chance.randint(0, 3) for _ in range(parts)]
        shape[dim] = sum(sizes)
        return tensor(chance, shape), Split(dim, sizes)
    if kind == "spans":
        shape[dim] = chance.randint(0, 12)
        return tensor(chance, shape), Split(dim, spans=spans(chance, shape[dim], parts))
    if kind == "stack":
        shape[dim] = parts
        return tensor(chance, shape), Stack(dim)
    if kind == "same":
        return tensor(chance, shape), Replicate()
    if kind == "value":
        return chance.choice([3, "text", 2.5, True, {"a": [1, None]}]), Replicate()
    return None, chance.choice([Split(1), Stack(), Replicate()])


def tree(chance: random.Random, parts: int, depth: int = 0) -> tuple[Any, Spec]:
    if depth == 3 or chance.random() < 0.3:
        return leaf(chance, parts)
    inner = [tree(chance, parts, depth + 1) for _ in range(2)]
    (one, first), (two, second) = inner
    kind = chance.randrange(6)
    if kind == 0:
        return {"one": one, "two": two}, {"one": first, "two": second}
    if kind == 1:
        return OrderedDict(two=two, one=one), {"one": first, "two": second}
    if kind == 2:
        return [one, two], [first, second]
    if kind == 3:
        return (one, two), (first, second)
    if kind == 4:
        return Pair(one, two), {"a": first, "b": second}
    return Record(one, two), {"kept": first, "cut": second}


def plain(value: Any) -> Any:
    """Containers as what `same` compares, each with its type."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [type(value).__name__, *(plain(getattr(value, field.name)) for field in dataclasses.fields(value))]
    if isinstance(value, Mapping):
        return [type(value).__name__, *((key, plain(one)) for key, one in value.items())]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(plain, value)]
    return value


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5))
def test_joining_is_the_inverse_of_cutting(seed: int, parts: int) -> None:
    chance = random.Random(seed)
    whole, spec = tree(chance, parts)
    cut = shard_tree(whole, spec, parts)
    assert len(cut) == parts
    assert same(plain(unshard_tree(cut, spec)), plain(whole))
    again = shard_tree(unshard_tree(cut, spec), spec, parts)
    assert same(plain(again), plain(cut))
    assert same(plain(shard_of_tree(whole, spec, parts, parts - 1)), plain(cut[-1]))


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 4))
def test_a_part_in_another_place_is_not_joined_to_the_same(seed: int, parts: int) -> None:
    """What joining gives depends on every entry of every part."""
    chance = random.Random(seed)
    sizes = [chance.randint(1, 4) for _ in range(parts)]
    whole = torch.arange(sum(sizes))
    for spec in (Split(0, sizes), Split(0, spans=spans(chance, len(whole), parts))):
        cut = shard_tree({"x": whole}, {"x": spec}, parts)
        assert sorted(torch.cat([one["x"] for one in cut]).tolist()) == whole.tolist()
        for part, own in zip(cut, spec.spans or (), strict=False):
            assert part["x"].tolist() == [at for start, stop in own for at in range(start, stop)]
        touched = next(one["x"] for one in cut if len(one["x"])).clone()
        touched[-1] = -1
        cut[next(at for at, one in enumerate(cut) if len(one["x"]))] = {"x": touched}
        assert unshard_tree(cut, {"x": spec})["x"].tolist().count(-1) == 1


def test_a_spec_holds_for_all_that_lies_below_it() -> None:
    ids = torch.arange(8).view(4, 2)
    found = shard_tree({"a": [ids, (ids + 1, None)], "b": ids}, {"a": Split(), "b": Replicate()}, 2)
    assert found[1]["a"][0].tolist() == [[4, 5], [6, 7]]
    assert found[1]["a"][1][0].tolist() == [[5, 6], [7, 8]]
    assert found[1]["b"] is ids
    assert found[0]["a"][0].data_ptr() == ids.data_ptr(), "one run of entries is no copy"


def test_gradients_flow_through_cuts_and_joins() -> None:
    whole = torch.arange(6.0).requires_grad_()
    spec = Split(0, spans=[[(0, 1), (4, 6)], [(1, 4)]])
    (torch.arange(6.0) * unshard_tree(shard_tree(whole, spec, 2), spec)).sum().backward()
    assert whole.grad is not None
    assert whole.grad.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_batch_is_cut_along_the_axes_that_it_names() -> None:
    ids = torch.arange(24).view(3, 8)
    batch = Batch(ids, torch.tensor([4, 5, 6]), ids + 1, extras={"x": ids.T.clone()}, axes={"x": Axes(1, 0)})
    rows = shard_tree(batch, batch.spec("batch", [1, 2]), 2)
    assert [one.inputs.shape[0] for one in rows] == [1, 2]
    assert rows[1].labels.tolist() == [5, 6]
    assert torch.equal(rows[1].extras["x"], ids.T[:, 1:])
    assert rows[0].document_ids is None
    assert not any(one.problem() for one in rows)
    assert same(unshard_tree(rows, batch.spec("batch")).tensors(), batch.tensors())
    spec = batch.spec("sequence", spans=[[(0, 2), (6, 8)], [(2, 6)]])
    slices = shard_tree(batch, spec, 2)
    assert slices[0].inputs[0].tolist() == [0, 1, 6, 7]
    assert slices[0].labels is batch.labels
    assert same(unshard_tree(slices, spec).tensors(), batch.tensors())


ONES = torch.ones(5, 2)


@pytest.mark.parametrize(
    ("tree", "spec", "says"),
    [
        ({"a": {"b": ONES}}, Split(), r"^a\.b: 5 entries can't be cut into 2 equal parts; say Split\(sizes=…\)"),
        ({"a": ONES}, Split(2), r"^a: is \[5, 2\], and its spec is Split\(dim=2, .*it has no such dimension"),
        ([ONES], Split(0, [2, 2]), r"^0: has 5 entries, and its spec cuts it into \[2, 2\]"),
        ([ONES], Split(0, [6, -1]), r"^0: has 5 entries, and its spec cuts it into \[6, -1\]"),
        (ONES, Split(0, [5]), r"^the tree: its spec is for 1 parts, and there are 2"),
        (ONES, Split(0, spans=[[(0, 2)], [(3, 5)]]), r"the spans do not cover each of its 5 entries once"),
        (ONES, Split(0, spans=[[(0, 3)], [(2, 5)]]), r"the spans do not cover each of its 5 entries once"),
        (ONES, Split(0, spans=[[(0, 4), (4, 2)], [(2, 5)]]), r"the spans do not cover each of its 5 entries once"),
        (ONES, Stack(), r"^the tree: dimension 0 of \[5, 2\] has no entry for each of 2"),
        ({"a": 3}, {"a": Split()}, r"^a: is an int, which can't be cut; its spec must be Replicate\(\)"),
        ({"a": ONES}, {}, r"^the tree: the spec does not say how 'a' is cut; it has \[\]"),
        ({"a": {}}, {"a": {"b": Split()}}, r"^a: the spec names 'b', which is not there; there is \[\]"),
        ({"a": ONES}, {"a": {"b": Split()}}, r"^a: is a Tensor, and its spec is a dict"),
        ([ONES], {"a": Split()}, r"^the tree: is a list, and its spec is a dict"),
        ({"a": ONES}, [Split()], r"^the tree: is a dict, and its spec is a list: the spec of a dict is a dict by key"),
        (
            Pair(ONES, None),
            Pair(Split(), None),
            r"its spec is a Pair: the spec of a NamedTuple .* is a dict by field\.",
        ),
    ],
)
def test_what_can_not_be_cut_is_refused_with_its_path(tree: Any, spec: Spec, says: str) -> None:
    with pytest.raises(PluginError, match=says):
        shard_tree(tree, spec, 2)


@pytest.mark.parametrize("parts", [0, -1, 2.0, True, "2"])
def test_parts_are_counted(parts: Any) -> None:
    with pytest.raises(PluginError, match=r"^shard_tree: the number of parts must be an integer, 1 or more, found"):
        shard_tree(ONES, Replicate(), parts)
    with pytest.raises(PluginError, match=r"^shard_of_tree: the number of parts must be an integer, 1 or more, found"):
        shard_of_tree(ONES, Replicate(), parts, 0)


def test_a_batch_has_two_axes() -> None:
    with pytest.raises(PluginError, match=r"^A batch is cut along its axis 'batch' or 'sequence', not 'seq'\.$"):
        Batch(ONES, ONES).spec("seq")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parts", "spec", "says"),
    [
        (
            [{"a": [ONES]}, {"a": [ONES + 1]}],
            Replicate(),
            r"^a\.0: part 1 differs from part 0, and Replicate\(\) is the same in every part",
        ),
        ([{"a": 1}, {"a": 1.0}], {"a": Replicate()}, r"^a: part 1 differs from part 0"),
        ([{"a": ONES}, {"a": ONES.double()}], Replicate(), r"^a: part 1 differs"),
        ([{"a": ONES}, {"b": ONES}], Split(), r"^the tree: part 1 has other keys, part 0 is a dict of \['a'\]"),
        ([{"a": ONES}, {"a": None}], Split(), r"^a: part 1 differs from part 0 in being None"),
        ([[ONES], (ONES,)], Split(), r"^the tree: part 1 is a tuple, part 0 is a list of \[0\]"),
        ([ONES, ONES.double()], Split(), r"parts 0 and 1 do not fit together: they are \[5, 2\] torch.float32 on cpu"),
        ([ONES, ONES[:, :1]], Split(), r"parts 0 and 1 do not fit together"),
        ([ONES, ONES[:1]], Stack(), r"parts 0 and 1 do not fit together"),
        ([ONES, ONES], Split(0, [5, 6]), r"has 10 entries, and its spec cuts it into \[5, 6\]"),
        ([ONES, ONES], Split(0, [4, 6]), r"its parts have \[5, 5\] entries along dimension 0, expected \[4, 6\]"),
        ([], Split(), r"there are no parts to join"),
    ],
)
def test_parts_that_do_not_fit_are_refused_with_their_path(parts: list[Any], spec: Spec, says: str) -> None:
    with pytest.raises(PluginError, match=says):
        unshard_tree(parts, spec)


def test_not_a_number_equals_itself_in_replicated_parts() -> None:
    nan = torch.tensor([torch.nan, 1.0])
    assert unshard_tree([{"a": nan}, {"a": nan.clone()}], Replicate())["a"] is nan


def test_sizes_and_spans_exclude_each_other() -> None:
    with pytest.raises(PluginError, match="give `sizes` or `spans`, not both"):
        Split(0, [1], [[(0, 1)]])
