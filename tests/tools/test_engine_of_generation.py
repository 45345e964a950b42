"""Rows that are generated side by side: each as if it were alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_models
from forge_train import ConfigError, ForgeError
from forge_train_kit.model import Slots
from forge_train_tools.generation.engine import _sound, run
from generation_rows import Greedy, generated, recomputed, requests, worst

pytestmark = pytest.mark.unit

MILD = "decoder.std=0.05"
"""Weights whose log-probabilities are small, so that 1e-6 is more than their rounding."""


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory that nobody wrote to is NaN, and so is that of a row that ended."""
    end = Slots.end

    def poison(slots: Slots, row: int, last: int) -> None:
        for keeper in slots._keepers:
            for held in keeper._held:  # type: ignore[attr-defined]
                held[row] = math.nan
        end(slots, row, last)

    monkeypatch.setattr(Slots, "end", poison)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def agree(job: Any, model: Any, most: float = 1e-6, *, same: bool = True) -> None:
    """Generate with several numbers of slots: bit for bit the same; up to rounding what recomputation gives."""
    wanted = [recomputed(job, model, row) for row in requests(9)]
    found = [generated(job, model, requests(9), slots) for slots in (1, 3, 8)]
    for one in found:
        assert worst(one, wanted) <= most
        assert worst(one, found[0]) <= (0 if same else most)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kernel", ["sdpa", "eager", "flex"])
def test_rows_are_computed_as_if_each_were_alone(kernel: str) -> None:
    """Flex takes no rows of different lengths: it is called for each."""
    agree(*tiny_models.composed(MILD, plugins=(kernel,)))


MLA = ("mla.kv_rank=16", "mla.q_rank=24", "mla.rope_dim=4", "decoder.kv_heads=4")
DELTA = ("decoder.layers=4", "delta_net.heads=4", "delta_net.k_heads=2", "delta_net.k_dim=6", "delta_net.chunk=5")
LONG = ("decoder.rope.scaling=longrope", "decoder.rope.short=[1,1,1,1]", "decoder.rope.long=[2,3,4,5]")
ORIGINAL = "decoder.rope.original_sequence=16"
MODELS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "latents": (("mla",), MLA),
    "states and keys": (("delta_net",), DELTA),
    "windows": ((), ("decoder.window=6",)),
    "windows in some layers, sinks, soft caps": (
        ("eager",),
        ("decoder.window=5", "decoder.window_layers=[true,false]", "decoder.sinks=true", "decoder.soft_cap=3"),
    ),
    "windows, a kernel called for each row": (("flex",), ("decoder.window=6",)),
    "learned positions": ((), ("decoder.positions=learned", "decoder.norm=layer", "decoder.parallel=true")),
    "experts": (("moe",), ("moe.experts=4", "moe.hidden=16", "moe.capacity=0.5")),
    "positions by length": ((), (*LONG, ORIGINAL)),
    "positions that change all keys": ((), ("decoder.rope.scaling=dynamic", "decoder.rope.factor=4", ORIGINAL)),
    "further tokens": (("mtp",), ()),
}


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_cache_works_side_by_side(name: str) -> None:
    """Numbers of an expert's tokens, and of heads, that do not fill a vector round by their number."""
    plugins, values = MODELS[name]
    exact = name not in ("experts", "states and keys")
    agree(*tiny_models.composed(MILD, *values, plugins=plugins), same=exact)


def test_layers_without_a_cache_are_computed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    job, model = tiny_models.composed(MILD)
    wanted = generated(job, model, requests(9), 3)
    attention = type(model.parts[0].get_submodule("layers.1.attention"))
    monkeypatch.delattr(attention, "new_slots")
    assert worst(generated(job, model, requests(9), 3), wanted) <= 1e-6
    monkeypatch.delattr(attention, "new_cache")
    assert worst(generated(job, model, requests(9), 3), wanted) <= 1e-6


def test_neither_the_order_nor_the_neighbours_change_a_row() -> None:
    job, model = tiny_models.composed()
    wanted = generated(job, model, requests(9), 4)
    assert worst(generated(job, model, requests(9)[::-1], 4), wanted) == 0
    assert worst(generated(job, model, requests(9)[2:3], 4), wanted[2:3]) == 0


def test_rows_come_as_they_end_and_make_place() -> None:
    job, model = tiny_models.composed()
    taken: list[int] = []

    def rows() -> Iterator[Greedy]:
        for number, most in enumerate((9, 2, 5, 1)):
            taken.append(number)
            yield Greedy(number, [number + 1], most)

    ended = []
    for row in run(job, model, rows(), slots=2):
        ended.append(row.number)
        assert row.done
        if row.number == 1:
            assert taken == [0, 1], "the next one is read when there is place"
    assert ended == [1, 2, 3, 0]


def test_what_generates_leaves_the_model_as_it_was() -> None:
    job, model = tiny_models.composed("decoder.dropout=0.5")
    model.train()
    model.parts[0].get_submodule("layers.0").eval()
    modes = [module.training for module in model.parts[0].modules()]
    rows = run(job, model, iter(requests(3)), slots=2)
    next(rows)
    assert torch.is_grad_enabled()
    rows.close()  # type: ignore[attr-defined]  # given up half-way
    assert [module.training for module in model.parts[0].modules()] == modes
    agree(job, model, 1e-4)  # no dropout


def test_logits_that_are_no_numbers_name_their_request() -> None:
    job, model = tiny_models.composed()
    next(iter(model.parameters())).data[7].fill_(math.nan)
    rows = [Greedy(4, [1, 2], 2), Greedy(5, [1, 7, 3], 2)]
    with pytest.raises(ForgeError, match="NaN after 3 tokens of request 5: its weights are damaged"):
        generated(job, model, rows, 2)


def test_infinite_logits_are_numbers() -> None:
    """Both infinities have no sum."""
    logits: list[Tensor | None] = [torch.tensor([math.inf, -math.inf, 0.0]), torch.zeros(3)]
    assert _sound([Greedy(0, [1], 2), Greedy(1, [1], 2)], logits, [(), ()]) == logits


@pytest.mark.parametrize(("slots", "values", "message"), [(0, (), "at least one at a time, not 0")])
def test_what_can_not_be_is_refused(slots: int, values: tuple[str, ...], message: str) -> None:
    job, model = tiny_models.composed(*values)
    with pytest.raises(ConfigError, match=message):
        run(job, model, iter(()), slots=slots)


def test_a_cache_is_as_large_as_its_formula() -> None:
    job, model = tiny_models.composed()
    slots = Slots(8, 64, job.device, joint=True)
    caches = model.parts[0].new_slots(slots)  # type: ignore[operator]
    slots.begin(0, 3)
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]), position_ids=torch.arange(3)[None], cache=caches)
    held = sum(one.nbytes for cache in caches.values() for one in cache._held)
    assert held == 2 * 2 * 2 * 8 * 64 * 8 * 4, "2 · layers · kv_heads · head_dim · capacity · slots · bytes"
